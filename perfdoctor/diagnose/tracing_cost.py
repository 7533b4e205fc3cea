"""What the tracer cost the host in this very loop: phases of its steps, before the tracer was on and while it was.

A session times `backward` and the optimizer's step by hooks, first without the tracer, then with it. Launches in a
tight loop lose 3 to 5 us each to the tracer on an H200's host; in the phases of four real loops they lost 4 to 10, for
the tracer also takes the caches. A loop that waits for its device does not show in its step time what its host costs;
its phases do.
"""

from __future__ import annotations

import numpy as np

from perfdoctor.diagnose.host_time import LAUNCH_BLOCKED_NS
from perfdoctor.diagnose.replay import blocking_copies
from perfdoctor.record.capture import Ints, RangeKind
from perfdoctor.record.timeline import SYNCS, Timeline

_FEWEST_ROUNDS = 3  # of a phase, without the tracer and with it
_FEWEST_CALLS = 20  # in the phases of a step: fewer are lost in the host's noise
_MOST_NS = 25_000


def measured_call_ns(timeline: Timeline) -> int | None:
    """What a traced CUDA call cost more than an untraced one, in ns; None where the recording does not say."""
    ranges, calls = timeline.capture.ranges, timeline.calls
    if not len(calls) or not len(ranges):
        return None
    begin = int(calls.start_ns.min())
    phases = np.flatnonzero(ranges.kind == RangeKind.PHASE)
    lost = num_calls = 0.0
    for name in np.unique(ranges.name[phases]).tolist():
        rows = phases[ranges.name[phases] == name]
        plain = rows[ranges.end_ns[rows] < begin]
        traced = np.array([row for row in rows.tolist() if ranges.start_ns[row] >= begin and _runs(timeline, row)], int)
        if min(len(plain), len(traced)) < _FEWEST_ROUNDS:
            continue
        lost += float(np.median(_lengths(timeline, traced)) - np.median(_lengths(timeline, plain)))
        num_calls += float(np.median([len(_calls_in(timeline, row)) for row in traced.tolist()]))
    if num_calls < _FEWEST_CALLS:
        return None
    return round(min(max(lost / num_calls, 0.0), _MOST_NS))


def _calls_in(timeline: Timeline, row: int) -> Ints:
    ranges, calls = timeline.capture.ranges, timeline.calls
    first, last = np.searchsorted(calls.start_ns, (ranges.start_ns[row], ranges.end_ns[row]))
    return np.arange(first, last)


def _runs(timeline: Timeline, row: int) -> bool:
    """Whether the host only launched in this phase: it waited for nothing, and for no room in the launch queue."""
    inside, calls = _calls_in(timeline, row), timeline.calls
    if not len(inside) or np.isin(calls.kind[inside], SYNCS).any() or np.isin(inside, blocking_copies(timeline)).any():
        return False
    return bool((calls.end_ns[inside] - calls.start_ns[inside]).max() < LAUNCH_BLOCKED_NS)


def _lengths(timeline: Timeline, rows: Ints) -> Ints:
    ranges = timeline.capture.ranges
    return ranges.end_ns[rows] - ranges.start_ns[rows]
