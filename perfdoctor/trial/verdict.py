"""What came of a treatment on trial. No torch in here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perfdoctor.diagnose.finding import StepTime
from perfdoctor.trial.estimate import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """How many times as fast, with its 95 % interval: 1.25 is a fifth less time."""

    mid: float
    low: float
    high: float

    @classmethod
    def of(cls, saving: Estimate, before_ns: float) -> SpeedUp:
        """From what a step saves of `before_ns`."""

        def ratio(saved_ns: float) -> float:
            left = before_ns - saved_ns
            return before_ns / left if left > 0 else math.inf

        return cls(mid=ratio(saving.mid_ns), low=ratio(saving.low_ns), high=ratio(saving.high_ns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Losses of the treated loop against those of the loop as it is: same state, same batches.

    `kept` is None where they could not be compared. `repeat` is what the untreated loop differs from itself by.
    """

    kept: bool | None
    text: str
    difference: float | None = None  # largest, absolute
    repeat: float | None = None
    num_losses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A treatment tried. A failure (out of memory included) is a Verdict as well: `reason` says what happened."""

    treatment: str  # its name; several joined by ' + '
    accepted: bool
    reason: str
    parity: Parity
    before: StepTime | None = None
    after: StepTime | None = None
    speed_up: SpeedUp | None = None
    saving: Estimate | None = None  # ns a step
    peak_memory_before_bytes: int | None = None
    peak_memory_after_bytes: int | None = None
    lines: tuple[str, ...] = ()  # what the user writes to keep it


def judge_parity(
    base: Sequence[float], again: Sequence[float], treated: Sequence[float], *, rtol: float, atol: float, why: str = ""
) -> Parity:
    """Hold the losses of a treated run against two untreated ones.

    A claim of bitwise equality (`rtol` and `atol` 0) is held to it where the loop repeats itself bit for bit; where
    it does not, twice its own difference is allowed on top of the tolerance.
    """
    if not base or not treated:
        return Parity(kept=None, text="no loss was seen (nothing called .backward() on a single value)")
    if len(base) != len(again) or len(base) != len(treated):
        return Parity(kept=None, text=f"{len(base)} losses without, {len(treated)} with the treatment")
    repeat = max((_distance(a, b) for a, b in zip(base, again, strict=True)), default=0.0)
    pairs = list(zip(base, treated, strict=True))
    difference = max(_distance(a, b) for a, b in pairs)
    kept = all(_distance(a, b) <= atol + rtol * abs(a) + 2 * repeat for a, b in pairs if not math.isnan(a))
    kept = kept and all(math.isnan(a) == math.isnan(b) for a, b in pairs)
    return Parity(
        kept=kept,
        text=_parity_text(kept, difference, repeat, rtol, atol, why),
        difference=difference,
        repeat=repeat,
        num_losses=len(pairs),
    )


def _distance(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    distance = abs(a - b)
    return math.inf if math.isnan(distance) else distance


def _parity_text(kept: bool, difference: float, repeat: float, rtol: float, atol: float, why: str) -> str:
    if difference == 0:
        return "losses equal bit for bit"
    allowed = "bit for bit" if rtol == atol == 0 else f"rtol {rtol:g}" + (f", atol {atol:g}" if atol else "")
    own = f"; the loop differs from itself by {repeat:.3g}" if repeat else ""
    because = f" ({why})" if why and rtol + atol > 0 else ""
    return f"losses {'within' if kept else 'off'} {allowed}{because}: largest difference {difference:.3g}{own}"
