"""What came of a treatment on trial. No torch in here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from perfdoctor.diagnose.finding import StepTime
from perfdoctor.trial.estimate import FEWEST_PAIRS, Estimate
from perfdoctor.trial.parity import NOT_COMPARED, Parity
from perfdoctor.units import format_plural

if TYPE_CHECKING:
    from perfdoctor.treat.treatment import Treatment


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


SPENT = "the time was spent (--seconds)"
UNDECIDED = "not decided"
_AND = " + "


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
    needed_s: float = 0.0  # seconds that it would have taken at least, where they were not left
    num_processes: int = 0  # that ran the script from its start for this; 0: blocks of steps in one process
    why_processes: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the treatments tried together; one where it was tried alone."""
        return tuple(self.treatment.split(_AND))

    @property
    def is_set(self) -> bool:
        """Whether several were tried together."""
        return len(self.names) > 1

    @property
    def saved_ns(self) -> float:
        """A step, as measured; 0 where it was not timed."""
        return 0.0 if self.saving is None else self.saving.mid_ns

    @property
    def wants_time(self) -> bool:
        """Whether more `--seconds` might decide it."""
        return not self.accepted and ("(--seconds)" in self.reason or self.reason.endswith(UNDECIDED))


def joined_name(treatments: Sequence[Treatment]) -> str:
    """What treatments tried together are called in a Verdict."""
    return _AND.join(treatment.name for treatment in treatments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Blocks (or processes) with the treatment, or without: ns a step of each, the most device memory in use in any."""

    times_ns: tuple[float, ...]
    counted: int
    peak_bytes: int | None
    unit: str = "blocks"

    @property
    def step_time(self) -> StepTime:
        low, mid, high = np.percentile(self.times_ns, (25, 50, 75))
        num = len(self.times_ns)
        return StepTime(
            median_ns=round(float(mid)), low_ns=round(float(low)), high_ns=round(float(high)),
            num_steps=self.counted * num, basis=f"{num} {self.unit} of {self.counted} steps",
        )  # fmt: skip


def refused(name: str, why: str) -> Verdict:
    """It does not fit this loop."""
    return Verdict(treatment=name, accepted=False, reason=f"does not fit: {why}", parity=NOT_COMPARED)


def untried(name: str, why: str) -> Verdict:
    """It was not reached."""
    return Verdict(treatment=name, accepted=False, reason=f"not tried: {why}", parity=NOT_COMPARED)


def cut_off(name: str, doing: str, seconds: float, parity: Parity) -> Verdict:
    """The time was over while it was tried: `doing` says at what, `seconds` for how long."""
    reason = f"cut off after {seconds:.0f} s, while {doing}: {SPENT}"
    return Verdict(treatment=name, accepted=False, reason=reason, parity=parity)


def too_long(name: str, needed_s: float, left_s: float, steps: int, parity: Parity) -> Verdict:
    """Six rounds of its blocks do not fit into what is left of the time."""
    reason = (
        f"not timed: {FEWEST_PAIRS} rounds of blocks of {steps} steps take some {needed_s:.0f} s, and "
        f"{max(left_s, 0):.0f} s were left (--seconds)"
    )
    return Verdict(treatment=name, accepted=False, reason=reason, parity=parity, needed_s=needed_s)


def not_run(name: str, why: str, *, blamed: bool) -> Verdict:
    """A process came to no timed step. `blamed`: the treatment was on by then, and has failed."""
    reason = why if blamed or why.startswith("failed") else f"not tried: {why}"
    return Verdict(treatment=name, accepted=False, reason=reason, parity=NOT_COMPARED)


def unequal(name: str, parity: Parity) -> Verdict:
    """It changes the numbers more than it claims."""
    reason = f"not timed, as it changes the numbers more than it claims: {parity.text}"
    return Verdict(treatment=name, accepted=False, reason=reason, parity=parity)


def failed(name: str, error: BaseException) -> Verdict:
    """It raised, or the script did while it was on."""
    memory = "out of memory: " if type(error).__name__ == "OutOfMemoryError" else ""
    text = " ".join(str(error).split())[:300]
    return Verdict(
        treatment=name,
        accepted=False,
        reason=f"failed: {memory}{type(error).__name__}: {text}",
        parity=NOT_COMPARED,
    )


def judged(
    name: str, parity: Parity, before: Side, after: Side, saving: Estimate, lines: tuple[str, ...], setting: str = ""
) -> Verdict:
    """It was timed: faster for sure, and with the same losses, or not."""
    base_ns = float(np.median(before.times_ns))
    accepted, reason = _decide(parity, saving, before.unit)
    reason = f"{setting}: {reason}" if setting else reason
    return Verdict(
        treatment=name,
        accepted=accepted,
        reason=reason,
        parity=parity,
        before=before.step_time,
        after=after.step_time,
        speed_up=SpeedUp.of(saving, base_ns),
        saving=saving,
        peak_memory_before_bytes=before.peak_bytes,
        peak_memory_after_bytes=after.peak_bytes,
        lines=lines if accepted else (),
    )


def _decide(parity: Parity, saving: Estimate, unit: str) -> tuple[bool, str]:
    if saving.num_pairs < FEWEST_PAIRS:
        return False, f"only {format_plural(saving.num_pairs, 'pair')} of {unit} fitted into the time: {UNDECIDED}"
    if not saving.certain:
        return False, "no difference: the interval holds zero"
    if saving.mid_ns < 0:
        return False, "slower"
    if parity.excuse:
        return True, f"faster; {parity.text}"
    if parity.kept is None:
        return False, f"faster, but the losses could not be compared: {parity.text}"
    return True, f"faster, {parity.text}"
