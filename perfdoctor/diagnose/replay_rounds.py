"""Which recorded calls make up the round that a replay runs again and again, and what its first calls wait for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfdoctor.record.capture import CallKind
from perfdoctor.record.timeline import Timeline

MAX_CALLS = 20_000  # in a round: more are cut to as many whole steps as fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """A range of calls, and how long it took as recorded."""

    first: int  # index into calls
    last: int  # exclusive
    num_steps: int  # 0: no steps known
    lead_ns: int  # host work before the first call, when a round follows another
    recorded_ns: int
    host_ns: int


def round_bounds(timeline: Timeline) -> Rounds:
    calls = timeline.calls
    steps = timeline.steps
    if steps is not None and steps.known and len(calls):
        return _round_of_steps(timeline)
    start, end = timeline.span
    return Rounds(
        first=0,
        last=_without_closing_sync(timeline),
        num_steps=0,
        lead_ns=0,
        recorded_ns=end - start,
        host_ns=end - start,
    )


def _round_of_steps(timeline: Timeline) -> Rounds:
    calls, steps = timeline.calls, timeline.steps
    assert steps is not None
    bounds = np.searchsorted(calls.start_ns, np.append(steps.host_start_ns, steps.host_end_ns[-1]))
    count = len(steps)
    while count > 1 and bounds[count] - bounds[0] > MAX_CALLS:
        count -= 1
    first, last = int(bounds[0]), int(bounds[count])
    begin, end = int(steps.host_start_ns[0]), int(steps.host_end_ns[count - 1])
    lead = int(calls.start_ns[first] - begin) + int(end - calls.end_ns[first:last].max()) if last > first else 0
    # The device's clock for the length: host bounds of a window that starts idle and ends with a queue lie. Without
    # work before the first step its window is cut short, and the others stand for it.
    whole = int(steps.window_end_ns[count - 1] - steps.window_start_ns[0])
    others = int(steps.window_end_ns[count - 1] - steps.window_end_ns[0])
    recorded = whole if steps.origin == "repetition" else round(others / max(count - 1, 1) * count)
    recorded = recorded if count > 1 else end - begin
    return Rounds(
        first=first,
        last=last,
        num_steps=count,
        lead_ns=max(lead, 0),
        recorded_ns=recorded,
        host_ns=end - begin,
    )


def _without_closing_sync(timeline: Timeline) -> int:
    """The profiler ends with a device-wide sync of its own, which is no part of the loop."""
    count = len(timeline.calls)
    return count - 1 if count and timeline.calls.kind[-1] == CallKind.SYNC_DEVICE else count


def inside_round(timeline: Timeline, rounds: Rounds, awaited: dict[int, int]) -> dict[int, int]:
    """The rows waited for; for one launched before the round, the row as far from the end of its stream's round.

    A round follows itself: what its first calls wait for is the end of the round before.
    """
    calls, work, launch = timeline.calls, timeline.work, timeline.launch_ns
    if not awaited or rounds.last <= rounds.first:
        return awaited
    begin, end = int(calls.start_ns[rounds.first]), int(calls.end_ns[rounds.last - 1])
    launched = {int(s): np.flatnonzero((work.stream == s) & (launch < end)) for s in np.unique(work.stream)}
    launched = {s: rows[np.argsort(launch[rows], kind="stable")] for s, rows in launched.items()}
    result = dict(awaited)
    for waiting, row in awaited.items():
        if row < 0 or launch[row] >= begin:
            continue
        rows = launched[int(work.stream[row])]
        before = int(np.searchsorted(launch[rows], begin))
        from_end = before - int(np.flatnonzero(rows == row)[0])
        result[waiting] = int(rows[-from_end]) if from_end <= len(rows) - before else -1
    return result
