"""Which work waited for work on another stream, read off the schedule itself.

A recording rarely says what an event wait waited for: event records are filtered out, and on CUDA 12.9 and later their
correlation is -1. But work that waited starts when what it waited for ends, much later than its launch and the work
before it on its own stream explain.
"""

from __future__ import annotations

import numpy as np

from perfdoctor.record.capture import Ints
from perfdoctor.record.timeline import Timeline

# A delay above this is not the latency of a launch; the end of the awaited work lies at most this far before the start.
UNEXPLAINED_NS = 30_000
_SIGNAL_NS = 30_000


def stream_dependencies(timeline: Timeline) -> dict[int, int]:
    """For each work that waited for another stream, the work that it waited for. Indices into `Timeline.work`."""
    work, launch = timeline.work, timeline.launch_ns
    if len(np.unique(work.stream)) < 2:
        return {}
    ready = np.maximum(launch, ends_before(timeline))
    waiting = np.flatnonzero((work.start_ns - ready > UNEXPLAINED_NS) & (timeline.call_of_work >= 0))
    by_end = np.argsort(work.end_ns, kind="stable")
    ends = work.end_ns[by_end]
    found: dict[int, int] = {}
    for row in waiting.tolist():
        awaited = _awaited(timeline, row, by_end, ends)
        if awaited >= 0:
            found[row] = awaited
    return found


def _awaited(timeline: Timeline, row: int, by_end: Ints, ends: Ints) -> int:
    """The work on another stream that ended last before `row` began and was launched before it; -1 for none near."""
    work, launch = timeline.work, timeline.launch_ns
    start = int(work.start_ns[row])
    place = int(np.searchsorted(ends, start, side="right")) - 1
    while place >= 0 and start - ends[place] <= _SIGNAL_NS:
        other = int(by_end[place])
        if work.stream[other] != work.stream[row] and launch[other] <= launch[row]:
            return other
        place -= 1
    return -1


def ends_before(timeline: Timeline) -> Ints:
    """(num_work,) the end of the work before on the same stream; 0 for the first."""
    work = timeline.work
    previous = np.zeros(len(work), np.int64)
    for stream in np.unique(work.stream):
        rows = np.flatnonzero(work.stream == stream)
        previous[rows] = np.concatenate(([0], np.maximum.accumulate(work.end_ns[rows])[:-1]))
    return previous
