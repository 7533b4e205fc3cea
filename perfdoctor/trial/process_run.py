"""One process of a trial in processes: what it is asked for, and what it found. Both travel as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOrder:
    """What a process is to do: run the script, apply the treatments `names` early, time `counted` steps, stop.

    `counted` 0 leaves the number to the process. With `dry`, losses without dropout are noted too.
    """

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    names: tuple[str, ...] = ()
    counted: int = 0
    dry: bool = False
    emulated: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        held: dict[str, Any] = json.loads(text)
        return cls(**{**held, "arguments": tuple(held["arguments"]), "names": tuple(held["names"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRun:
    """What a process found. `step_ns`: each counted step; empty where it came to none, with the reason in `failure`.

    `losses` are of the first steps with the treatments, `dry_losses` of those before them, without dropout.
    """

    names: tuple[str, ...] = ()  # applied; of several, those that fit beside each other
    step_ns: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
    dry_losses: tuple[float, ...] = ()
    peak_bytes: int | None = None
    failure: str = ""
    started: bool = False  # the treatments were on when it failed
    num_steps: int = 0  # in all
    notes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()  # to keep what was applied, in this loop
    setting: str = ""  # what that set, where it depends on the loop
    seconds: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        held: dict[str, Any] = json.loads(text)
        columns = {name: tuple(value) for name, value in held.items() if isinstance(value, list)}
        return cls(**held | columns)
