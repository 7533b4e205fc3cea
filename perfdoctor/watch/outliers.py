"""Which steps of a long run stand out, and what each is billed to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record import intervals
from perfdoctor.record.capture import Ints, Site
from perfdoctor.record.intervals import Intervals
from perfdoctor.watch import happenings as kinds
from perfdoctor.watch.happenings import Happening

_TIMES_MEDIAN = 1.5
_TIMES_SPREAD = 5  # of the distance between the quartiles: a loop on batches of every size has no outliers
# What is more exact comes first, and what it claims nobody else can: an evaluation may hold a collection.
_TIMED = (kinds.CHECKPOINT, kinds.COLLECTION, kinds.EVALUATION, kinds.EPOCH_END)
_UNTIMED = (kinds.RECOMPILATION, kinds.ALLOCATION)


class Bill(NamedTuple):
    """A part of what an outlier took too long: `ns` for `cause`, at `site` where a line is to blame."""

    cause: str
    ns: int
    site: Site | None = None


class Outlier(NamedTuple):
    """A step that took far longer than the others. `bills` add up to `excess_ns`; what no cause explains is
    'not known'."""

    step: int  # the run's own count of updates, from 0
    step_ns: int
    excess_ns: int  # beyond the median step
    bills: tuple[Bill, ...]

    @property
    def cause(self) -> str:
        """The cause with the largest bill."""
        return max(self.bills, key=lambda bill: bill.ns).cause


def find_outliers(
    *, durations: Ints, end_ns: Ints, data_ns: Ints, rows: Sequence[Happening], watched: NDArray[np.bool_], warmup: int
) -> tuple[Outlier, ...]:
    """Steps after `warmup`, unwatched, that take over 1.5 times the median and five times the usual spread beyond it.

    Args:
        durations: (n - 1,) ns of each step but the first.
        end_ns: (n,) host time of the end of each step.
        data_ns: (n,) ns that each waited for batches.
        rows: what happened, in any order.
        watched: (n,) steps slowed by a recording.
        warmup: so many steps at the start are no outliers.
    """
    judged = np.arange(1, len(durations) + 1)
    judged = judged[(judged >= warmup) & ~watched[1 : len(durations) + 1]]
    if len(judged) < 3:
        return ()
    low, median, high = np.percentile(durations[judged - 1], (25, 50, 75))
    limit = max(_TIMES_MEDIAN * median, median + _TIMES_SPREAD * (high - low))
    usual_wait = int(np.median(data_ns[judged]))
    found = []
    for step in judged[durations[judged - 1] > limit].tolist():
        length, span = int(durations[step - 1]), (int(end_ns[step - 1]), int(end_ns[step]))
        inside = [row for row in rows if row.start_ns < span[1] and row.end_ns >= span[0]]
        waited = max(int(data_ns[step]) - usual_wait, 0)
        excess = length - int(median)
        found.append(Outlier(step, length, excess, bill(excess, inside, span, waited)))
    return tuple(found)


def bill(excess_ns: int, rows: Sequence[Happening], span: tuple[int, int], waited_ns: int) -> tuple[Bill, ...]:
    """Split `excess_ns` over what happened in the step `span`, largest first; the parts add up to it.

    Timed causes get the time that no cause before them claimed, at most what is left; then the wait for data beyond
    the usual one; then a recompilation or an allocation, whose time nobody measured, takes the rest.
    """
    left, claimed = excess_ns, intervals.EMPTY
    bills: list[Bill] = []
    waited_left = waited_ns
    for cause in _TIMED:
        own = [row for row in rows if row.cause == cause and row.end_ns > row.start_ns]
        covered = intervals.clip(_union(own), *span)
        taken = min(intervals.total(intervals.subtract(covered, claimed)), left)
        claimed = intervals.merge(claimed, covered)
        if taken > 0:
            bills.append(Bill(cause, taken, own[-1].site))
            left -= taken
        if cause == kinds.EPOCH_END and own:  # the wait for its first batch is part of it
            waited_left = 0
    if waited := min(waited_left, left):
        bills.append(Bill(kinds.DATA_WAIT, waited))
        left -= waited
    untimed = next((row.cause for cause in _UNTIMED for row in rows if row.cause == cause), kinds.UNKNOWN)
    if left > 0 or not bills:
        bills.append(Bill(untimed, left))
    return tuple(sorted(bills, key=lambda each: -each.ns))


def _union(rows: list[Happening]) -> Intervals:
    return intervals.union(
        np.array([row.start_ns for row in rows], np.int64), np.array([row.end_ns for row in rows], np.int64)
    )


def summarise(outliers: Sequence[Outlier]) -> list[tuple[str, int, int]]:
    """(cause, number of outliers billed for it, ns in all), most expensive first."""
    table: dict[str, list[int]] = {}
    for outlier in outliers:
        for each in outlier.bills:
            row = table.setdefault(each.cause, [0, 0])
            row[0] += 1
            row[1] += each.ns
    return sorted(((cause, number, ns) for cause, (number, ns) in table.items()), key=lambda row: -row[2])
