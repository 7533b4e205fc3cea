"""What the host did between and inside its CUDA calls, without what being traced cost it."""

from __future__ import annotations

import numpy as np

from perfdoctor.record.capture import Costs, Ints, Spans
from perfdoctor.record.timeline import LAUNCHING, SYNCS, Timeline

# a longer recording is replayed on its first steps: about 20 ms a round
# A launch that takes longer than this waited for room in the launch queue; its own work is that of its neighbours.
LAUNCH_BLOCKED_NS = 200_000
# A host pause longer than this before a launch is work of its own (a loader, Python), which no CUDA graph takes away.
LAUNCH_PATH_NS = 200_000
UNTRACED = Costs(call_ns=0, op_ns=0, frame_ns=0, full_share=0.0)


def host_times(
    timeline: Timeline, costs: Costs, index: Ints, lead_ns: int, busy_until: Ints, wait_end: Ints
) -> tuple[list[int], list[int], list[int]]:
    """Host work before, inside and after the waiting of each call, corrected for what tracing cost.

    `index`: the calls; `busy_until`: until when the queue of each was busy before it; `wait_end`: the recorded end of
    what each waited for, 0 for those that do not wait; `lead_ns`: host work before the first.
    """
    calls = timeline.calls
    kind, start, end = calls.kind[index], calls.start_ns[index], calls.end_ns[index]
    before = np.maximum(start - busy_until, 0)
    if len(before):
        before[0] = lead_ns
    waited = np.clip(wait_end - start, 0, end - start)
    tail = np.where(wait_end > 0, end - np.maximum(wait_end, start), 0)
    tail = np.where(np.isin(kind, SYNCS), np.maximum(tail, 0), tail)
    own = _without_queue_blocking(np.where(wait_end > 0, 0, end - start), kind)
    before, own = _less_tracing(timeline, costs, index, before, own)
    # A staged copy returns while its last piece is still under way: its tail is negative and no cost of tracing.
    tail = np.where(tail > 0, np.maximum(tail - costs.call_ns, np.where(waited > 0, 1_000, 0)), tail)
    return before.tolist(), own.tolist(), tail.tolist()


def _without_queue_blocking(own: Ints, kind: Ints) -> Ints:
    launches = np.isin(kind, LAUNCHING)
    usual = int(np.median(own[launches])) if launches.any() else 0
    return np.where(launches & (own > LAUNCH_BLOCKED_NS), usual, own)


def _less_tracing(timeline: Timeline, costs: Costs, index: Ints, before: Ints, own: Ints) -> tuple[Ints, Ints]:
    """Host work less the cost of being traced, never below nothing.

    The tracer runs partly before the call's recorded start and partly inside it: the gap pays first. Where ops are
    recorded too, everything on the launch path is traced and slower by a share of itself; a long segment is work of its
    own, slowed only by the ops and frames that it holds.
    """
    cost = np.full(len(index), costs.call_ns, np.int64)
    if len(timeline.capture.ops):
        long = before > LAUNCH_PATH_NS
        cost = np.where(long, cost + _counted(timeline, costs, index, before), 0)
        cost = np.where(long, cost, np.round(costs.full_share * (before + own)).astype(np.int64))
    elif costs.light_share:
        rest = np.maximum(before + own - cost, 0)
        cost = np.where(before > LAUNCH_PATH_NS, cost, cost + np.round(costs.light_share * rest).astype(np.int64))
    from_gap = np.minimum(cost, before)
    return before - from_gap, np.maximum(own - (cost - from_gap), 0)


def _counted(timeline: Timeline, costs: Costs, index: Ints, before: Ints) -> Ints:
    """The cost of the ops and frames that begin or end between each call and the one before it."""
    ends = timeline.calls.start_ns[index]
    starts = ends - before
    cost = np.zeros(len(index), np.int64)
    python, builtin = _frames(timeline)
    for table, each in (
        (timeline.capture.ops, costs.op_ns),
        (python, costs.frame_ns),
        (builtin, costs.builtin_ns),
    ):
        if len(table) and each:
            closed = np.sort(table.end_ns)
            count = np.searchsorted(table.start_ns, ends) - np.searchsorted(table.start_ns, starts)
            count += np.searchsorted(closed, ends) - np.searchsorted(closed, starts)
            cost += (count * each) // 2
    return cost


def _frames(timeline: Timeline) -> tuple[Spans, Spans]:
    """Frames of Python functions and frames of C functions."""
    frames = timeline.capture.frames
    builtin = timeline.capture.matching(lambda name: name.startswith("<built-in"))[frames.name]
    return frames.take(~builtin), frames.take(builtin)
