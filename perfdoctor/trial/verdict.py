"""What came of a treatment on trial. No torch in here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from perfdoctor.diagnose.finding import StepTime
from perfdoctor.trial.estimate import FEWEST_PAIRS, Estimate
from perfdoctor.units import format_plural

if TYPE_CHECKING:
    from perfdoctor.treat.treatment import Treatment

# A loop that differs from itself by more than this share of its loss, and more than the treatment may change it, was
# not given the same batches: at a loss of ln 10 for ten classes, other batches differ by 2 %.
_REPEATS = 1e-3
# Untreated runs at most that a treated one is held against. Kernels that add in no fixed order differ by chance: of
# eleven runs of a GPT with cuDNN's attention on an H200 several pairs were equal bit for bit, the others 6e-5 apart.
MOST_BASES = 5


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
    `excuse`: why they may differ though the loop computes the same.
    """

    kept: bool | None
    text: str
    difference: float | None = None  # largest, absolute
    repeat: float | None = None
    num_losses: int = 0
    excuse: str = ""


SPENT = "the time was spent (--seconds)"
UNDECIDED = "not decided"
_AND = " + "
NOT_COMPARED = Parity(kept=None, text="not compared")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What losses may differ by under treatments: `atol + rtol * |loss|`, and why. `other_draws`: see `Numerics`."""

    rtol: float = 0.0
    atol: float = 0.0
    why: str = ""
    other_draws: str = ""

    @classmethod
    def of(cls, treatments: Sequence[Treatment]) -> Allowed:
        """Of treatments applied together."""
        numerics = [treatment.numerics for treatment in treatments]
        return cls(
            rtol=sum(each.rtol for each in numerics),
            atol=sum(each.atol for each in numerics),
            why="; ".join(each.why for each in numerics if each.why and not each.bitwise),
            other_draws="; ".join(each.other_draws for each in numerics if each.other_draws),
        )

    def holds(self, base: float, treated: float, beyond: float = 0.0) -> bool:
        """Whether the two are within it, or `beyond` it by so much. NaN is met by NaN alone."""
        if math.isnan(base) or math.isnan(treated):
            return math.isnan(base) and math.isnan(treated)
        return _distance(base, treated) <= self.atol + self.rtol * abs(base) + beyond


def judge_parity(bases: Sequence[Sequence[float]], treated: Sequence[float], allowed: Allowed) -> Parity:
    """Hold the losses of a treated run against those of untreated ones, two at least.

    A claim of bitwise equality (`rtol` and `atol` 0) is held to it where the loop repeats itself bit for bit; where
    it does not, twice its own difference is allowed on top of the tolerance.
    """
    base = bases[0]
    if not base or not treated:
        return Parity(kept=None, text="no loss was seen (nothing called .backward() on a single value)")
    for other, which in [*((each, "again without") for each in bases[1:]), (treated, "with")]:
        if len(base) != len(other):
            return Parity(kept=None, text=f"{len(base)} losses without, {len(other)} {which} the treatment")
    steps = list(zip(*bases, strict=True))
    if all(map(math.isnan, base)):
        return Parity(kept=None, text="every loss is NaN, with and without", num_losses=len(base))
    repeat = max(_distance(a, b) for step in steps for a, b in combinations(step, 2))
    if repeat > allowed.atol + max(allowed.rtol, _REPEATS) * _largest(base):
        text = f"the loop differs from itself by {repeat:.3g} from the same state: its batches are others each time"
        return Parity(kept=None, text=text, repeat=repeat, num_losses=len(base))
    pairs = list(zip(base, treated, strict=True))
    difference = max(_distance(a, b) for a, b in pairs)
    kept = all(allowed.holds(a, b, beyond=2 * repeat) for a, b in pairs)
    alone = all(allowed.holds(a, b) for a, b in pairs)
    found = Parity(kept=kept, text="", difference=difference, repeat=repeat, num_losses=len(pairs))
    if not kept and allowed.other_draws:
        text = f"losses differ by {difference:.3g}: {allowed.other_draws}"
        return replace(found, kept=None, text=text, excuse=allowed.other_draws)
    return replace(found, text=_parity_text(found, allowed, alone=alone))


def is_doubtful(parity: Parity, base: Sequence[float]) -> bool:
    """Whether more runs of the untreated loop may show that it differs from itself as much as the treated one does."""
    if parity.kept is not False or parity.difference is None:
        return False
    return parity.difference <= 2 * _REPEATS * _largest(base)


def _largest(losses: Sequence[float]) -> float:
    return max((abs(loss) for loss in losses if not math.isnan(loss)), default=0.0)


def _distance(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    distance = abs(a - b)
    return math.inf if math.isnan(distance) else distance


def _parity_text(parity: Parity, allowed: Allowed, *, alone: bool) -> str:
    """`alone`: within what is allowed, without what the loop differs from itself by."""
    if parity.difference == 0:
        return "losses equal bit for bit"
    own = f"; the loop differs from itself by {parity.repeat:.3g}" if parity.repeat else ""
    if parity.kept and not alone:
        return f"losses differ as those of the loop itself do: largest difference {parity.difference:.3g}{own}"
    if allowed.rtol == allowed.atol == 0:
        return f"losses not equal bit for bit: largest difference {parity.difference:.3g}{own}"
    limits = f"rtol {allowed.rtol:g}" + (f", atol {allowed.atol:g}" if allowed.atol else "")
    because = f" ({allowed.why})" if allowed.why else ""
    held = "within" if parity.kept else "off"
    return f"losses {held} {limits}{because}: largest difference {parity.difference:.3g}{own}"
