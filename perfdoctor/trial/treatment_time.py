"""The time of the treatments on trial in one process: what each needs at least, its share, and when its blocks end.

Each has what its blocks need at least kept back for it, and an equal share of what is left beyond. One that can save
nothing that counts ends early. One that seems to save much, but not beyond doubt, goes on once all have been tried.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from perfdoctor.treat.cures import OF_THE_LOADER
from perfdoctor.treat.treatment import Treatment
from perfdoctor.trial.estimate import FEWEST_PAIRS, LEAST_CLAIM, Estimate, claimed
from perfdoctor.trial.loader_places import LoaderUse
from perfdoctor.trial.parity import NOT_COMPARED
from perfdoctor.trial.schedule import counted_steps
from perfdoctor.trial.treated_steps import EDGE, PARITY_STEPS, TreatedBlock
from perfdoctor.trial.verdict import Verdict, too_long

MOST_ROUNDS = 16
_MOST_COUNTED = 200
_LONG_BLOCK_NS = 1.5e9  # an epoch of more is timed in parts, where nothing begins anew with it
_FOR_THE_BEST = 0.2  # of the time: kept back for the best together
_MARGIN = 1.25  # one is cut at the end of its step
_PROMISING = 0.02  # of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class TreatmentLimits:
    """How long the trial may take: in all, and the blocks of one treatment, its share of what is left at most.

    At least six rounds are run; as long again twice where a treatment seems to save much and time is left."""

    seconds: float = 180.0
    each_seconds: float = 20.0
    rounds: int = MOST_ROUNDS


@dataclass(slots=True, kw_only=True)
class TreatmentTime:
    """`seconds` since `began` (of the clock `now`), in which steps of `step_ns` are made with a loader as it is."""

    began: float
    seconds: float
    step_ns: float = 0.0
    use: LoaderUse = field(default_factory=LoaderUse)
    now: Callable[[], float] = time.perf_counter

    @property
    def over(self) -> float:
        """When it is over, on that clock."""
        return self.began + self.seconds

    def remaining(self) -> float:
        """Seconds left, for the best together too."""
        return self.over - self.now()

    def remaining_for_each(self) -> float:
        """Seconds left for the treatments one by one."""
        return self.remaining() - _FOR_THE_BEST * self.seconds

    def least_of(self, treatment: Treatment) -> float:
        """Seconds that it takes at least."""
        return self.least(loader_period(self.use, self.step_ns) if treatment.name in OF_THE_LOADER else 1)

    def least(self, period: int = 1) -> float:
        """Seconds to compare losses and time the fewest rounds, blocks a multiple of `period`."""
        block = TreatedBlock(edge=EDGE, counted=counted_steps(self.step_ns, multiple=period), replayed=True)
        return self.seconds_of(block) + 2 * PARITY_STEPS * self.step_ns / 1e9

    def seconds_of(self, block: TreatedBlock) -> float:
        """Of the fewest rounds: two blocks and, in the middle, half of one that is skipped."""
        return (2.5 * FEWEST_PAIRS + 1) * block.steps * self.step_ns / 1e9

    def last_moment(self, waiting: Sequence[Treatment]) -> float:
        """When the first of those that wait has to end, on that clock, for the others to have what they need.

        Half of what is left at least is its own: what it cannot do without is not known beforehand.
        """
        left = self.remaining_for_each()
        return self.now() + max(left - _MARGIN * sum(map(self.least_of, waiting[1:])), left / 2)

    def too_long(self, name: str, left_s: float) -> Verdict:
        """What is said of a treatment that does not fit into the seconds left."""
        steps = TreatedBlock(edge=EDGE, counted=counted_steps(self.step_ns), replayed=True).steps
        return too_long(name, self.least(), left_s, steps, NOT_COMPARED)

    def spare(self, waiting: Sequence[Treatment]) -> float:
        """Seconds beyond what those that wait, and the best together, need."""
        return self.remaining_for_each() - sum(map(self.least_of, waiting))


class Patience:
    """When the blocks of a treatment have been enough. `waiting`: it and those behind it; empty: the best together."""

    def __init__(
        self, left: TreatmentTime, waiting: Sequence[Treatment], limits: TreatmentLimits, *, shares: int = 1
    ) -> None:
        self._left = left
        self._rounds = shares * limits.rounds
        self._began = left.now()
        self._seconds = min(shares * limits.each_seconds, max(self._fair(waiting), 0.0))

    @property
    def seconds(self) -> float:
        """For its blocks."""
        return self._seconds

    def ends(self, rounds: int, saving: Estimate) -> bool:
        """Whether to end after so many rounds, which saved so much.

        It is not asked whether the saving is sure by now: who stops at that claims too often.
        """
        if saving.high_ns < LEAST_CLAIM * self._left.step_ns:
            return True
        return rounds >= self._rounds or self._left.now() - self._began >= self._seconds

    def _fair(self, waiting: Sequence[Treatment]) -> float:
        if not waiting:
            return self._left.remaining()
        needed = self._left.least_of(waiting[0])
        return needed + max(self._left.spare(waiting), 0.0) / len(waiting)


def is_promising(saving: Estimate, step_ns: float) -> bool:
    """Whether it seems to save much, but not beyond doubt: more blocks may leave zero out."""
    return saving.mid_ns > _PROMISING * step_ns and not claimed(saving, step_ns).certain


def loader_period(use: LoaderUse, step_ns: float, *, workers: int = 0) -> int:
    """Steps after which a loader's costs come again: its workers' turns, and an epoch.

    `workers`: of a treated one, which persist. An epoch counts up to 200 steps where workers start anew in each, else
    where it is short.
    """
    own = getattr(use.loader, "num_workers", 0)
    turns = max(workers, own, 1)
    both = math.lcm(turns, _epoch_of(use))
    persist = not use.made_anew and (own == 0 or getattr(use.loader, "persistent_workers", False))
    respawns = max(workers, own) > 0 and not persist
    most = _MOST_COUNTED if respawns else min(_MOST_COUNTED, _LONG_BLOCK_NS / max(step_ns, 1.0))
    return both if both <= most else turns


def _epoch_of(use: LoaderUse) -> int:
    """Steps of an epoch: as seen, at most its batches (an optimizer may step more often); 1 where nothing is known."""
    try:
        length = max(len(use.loader), 1)
    except TypeError:  # a stream, or none
        return use.epoch or 1
    return min(use.epoch or length, length)
