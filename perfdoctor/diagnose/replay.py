"""Replay: the recorded schedule as queues, run again with one cause taken away.

The host is one queue of CUDA API calls in the order of time (autograd's thread and the main one take turns; a thread
that truly runs beside them gets a queue of its own). Every stream is a queue of device work. Edges: a launch precedes
its work, work on one stream runs in order, an event wait holds a stream back, a sync holds the host back. Between two
calls the host is busy for as long as the recording says, less what being traced cost it.

The steps are replayed several times round and the last round counts: a loop freed from a sync needs some steps until
its host has run ahead, and a window that ends with the loop would otherwise count the drain.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from perfdoctor.diagnose.dependencies import (
    event_targets,
    once_per_timeline,
    start_costs,
    stream_dependencies,
    sync_streams,
    sync_targets,
)
from perfdoctor.diagnose.host_time import LAUNCH_PATH_NS, UNTRACED, host_times
from perfdoctor.diagnose.replay_rounds import Rounds, inside_round, round_bounds
from perfdoctor.record.capture import CallKind, CopyKind, Costs, HostMemory, Ints
from perfdoctor.record.timeline import SYNCS, Timeline

ROUNDS = 3
# A kernel inside a CUDA graph cost 0.85 us on an H200, an eager launch 10.8 us.
GRAPHED_LAUNCH_NS = 850


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """What to take away or change. All sets hold indices into `Timeline.calls`."""

    unblocked: frozenset[int] = frozenset()  # syncs and copies that no longer hold the host back
    muted: frozenset[int] = frozenset()  # calls that cost the host nothing and launch nothing; what led to them stays
    dropped: frozenset[int] = frozenset()  # calls that vanish with the host time before them and their work
    host_saved_ns: dict[int, int] = field(default_factory=dict)  # host time that vanishes before a call
    work_scale: dict[int, float] = field(default_factory=dict)  # device time of a call's work, times this
    graphed: frozenset[int] = frozenset()  # launches replayed by a CUDA graph: GRAPHED_LAUNCH_NS each

    def __or__(self, other: Edits) -> Edits:
        """Both taken away at once."""
        return Edits(
            unblocked=self.unblocked | other.unblocked,
            muted=self.muted | other.muted,
            dropped=self.dropped | other.dropped,
            host_saved_ns={
                call: self.host_saved_ns.get(call, 0) + other.host_saved_ns.get(call, 0)
                for call in self.host_saved_ns.keys() | other.host_saved_ns.keys()
            },
            work_scale=self.work_scale | other.work_scale,
            graphed=self.graphed | other.graphed,
        )


NOTHING = Edits()


@dataclass(slots=True, kw_only=True)
class _Queue:
    """One pass over the steps as plain lists: the interpreter walks them faster than arrays."""

    lane: list[int]
    before_ns: list[int]  # host work before the call, corrected
    own_ns: list[int]  # host work inside the call, without waiting
    tail_ns: list[int]  # from the end of what it waited for to the return of the call
    kind: list[int]
    stream: list[int]
    target: list[int]  # event sync: the row of the work waited for; -1 for none
    waits: list[bool]  # a copy that holds the host back
    # (row, stream, latency, gap, duration, row of the work on another stream that it waits for or -1)
    works: list[tuple[tuple[int, ...], ...]]
    awaited: frozenset[int]  # rows whose end others wait for
    calls: list[int]  # index into Timeline.calls
    closing_ns: list[int]  # host work after the last call of the round, a lane each
    busy_until: Ints  # until when the queue of each call was busy before it
    wait_end: Ints  # recorded end of what each call waited for; 0 for those that do not wait


class Replay:
    """Replays one timeline under edits; `period_ns` is the time of one round divided by the steps in it.

    Attributes:
        num_steps: steps in a round, or 1 where none are known.
        steady: whether a round can follow itself (steps are known); otherwise one round is timed whole.
    """

    def __init__(self, timeline: Timeline, costs: Costs | None = None) -> None:
        self.timeline = timeline
        self.costs = costs or UNTRACED
        self.rounds = round_bounds(timeline)
        self.steady = self.rounds.num_steps > 0
        self.num_steps = max(self.rounds.num_steps, 1)
        self._queue = _build(timeline, self.costs, self.rounds)

    def with_costs(self, costs: Costs) -> Replay:
        """The same schedule, corrected for other costs of tracing: everything that does not depend on them is kept."""
        other = copy.copy(self)
        queue = self._queue
        before, own, tail = host_times(
            self.timeline, costs, self.calls, self.rounds.lead_ns, queue.busy_until, queue.wait_end
        )
        other.costs = costs
        other._queue = replace(queue, before_ns=before, own_ns=own, tail_ns=tail)
        return other

    @property
    def calls(self) -> Ints:
        """The calls that a round replays."""
        return np.array(self._queue.calls, np.int64)

    def merged(self, calls: Collection[int]) -> Edits:
        """Launches that another launch does the work of: they and the path to them vanish, the host's own work stays.

        Of the time before a call at most twice the median of these calls goes: the rest is a loader, Python.
        """
        before = {call: ns for call, ns in zip(self._queue.calls, self._queue.before_ns, strict=True) if call in calls}
        usual = 2 * round(float(np.median(list(before.values())))) if before else 0
        return Edits(muted=frozenset(calls), host_saved_ns={call: min(ns, usual) for call, ns in before.items()})

    def period_ns(self, edits: Edits = NOTHING) -> int:
        """Time of one step (or of the whole window, where no steps are known) under the edits."""
        ends = _run(self._queue, edits, ROUNDS if self.steady else 1)
        length = ends[-1] - (ends[-2] if len(ends) > 1 else 0)
        return round(length / self.num_steps)

    def recorded_ns(self) -> int:
        """What the recording says for the same round: for checking the replay against."""
        return round(self.rounds.recorded_ns / self.num_steps)

    def host_recorded_ns(self) -> int:
        """The same by the host's clock: right where its first step is unlike the others, wrong where it runs ahead."""
        return round(self.rounds.host_ns / self.num_steps)

    @property
    def edges(self) -> tuple[Ints, Ints] | None:
        """`(starts, ends)` of the host time before the first and after the last call of a round, which become one when
        a round follows another; None where no steps are known."""
        steps, calls, rounds = self.timeline.steps, self.timeline.calls, self.rounds
        if not self.steady or steps is None or rounds.last <= rounds.first:
            return None
        inside = slice(rounds.first, rounds.last)
        starts = (steps.host_start_ns[0], calls.end_ns[inside].max())
        ends = (calls.start_ns[rounds.first], steps.host_end_ns[rounds.num_steps - 1])
        return np.array(starts, np.int64), np.array(ends, np.int64)


def _build(timeline: Timeline, costs: Costs, rounds: Rounds) -> _Queue:
    calls = timeline.calls
    index = np.arange(rounds.first, rounds.last)
    kind = calls.kind[index]
    lanes, busy_until = _lanes(timeline, index)
    wait_end = _wait_ends(timeline, index)
    before, own, tail = host_times(timeline, costs, index, rounds.lead_ns, busy_until, wait_end)
    streams = sync_streams(timeline)
    waits = inside_round(timeline, rounds, stream_dependencies(timeline))
    targets = inside_round(timeline, rounds, event_targets(timeline))
    return _Queue(
        lane=lanes.tolist(),
        before_ns=before,
        own_ns=own,
        tail_ns=tail,
        busy_until=busy_until,
        wait_end=wait_end,
        kind=kind.tolist(),
        stream=streams[index].tolist(),
        target=[targets.get(i, -1) for i in index.tolist()],
        waits=((wait_end > 0) & ~np.isin(kind, SYNCS)).tolist(),
        works=_works(timeline, index, waits),
        awaited=frozenset(waits.values()) | frozenset(targets.values()),
        calls=index.tolist(),
        closing_ns=[0] * (int(lanes.max()) + 1 if len(lanes) else 1),
    )


def _lanes(timeline: Timeline, index: Ints) -> tuple[Ints, Ints]:
    """The queue of each call, and until when that queue was busy before it.

    Threads take turns in one queue unless their calls overlap: a thread with over a tenth of its calls running inside
    another thread's calls works beside it.
    """
    calls = timeline.calls
    thread, start, end = calls.thread[index], calls.start_ns[index], calls.end_ns[index]
    lane = np.zeros(len(index), np.int64)
    values, counts = np.unique(thread, return_counts=True)
    reach = np.maximum.accumulate(np.concatenate(([0], end[:-1]))) if len(end) else end
    overlapped = start < reach
    number = 0
    for value, count in sorted(zip(values.tolist(), counts.tolist(), strict=True), key=lambda pair: -pair[1])[1:]:
        mine = thread == value
        if overlapped[mine].sum() > 0.1 * count:
            number += 1
            lane[mine] = number
    until = np.zeros(len(index), np.int64)
    for each in range(number + 1):
        mine = np.flatnonzero(lane == each)
        ends = np.maximum.accumulate(end[mine])
        until[mine] = np.concatenate((start[mine][:1], ends[:-1]))
    return lane, until


def _wait_ends(timeline: Timeline, index: Ints) -> Ints:
    """For every call that holds the host back, the recorded end of what it waited for; 0 for the others."""
    calls, work = timeline.calls, timeline.work
    result = np.zeros(len(calls), np.int64)
    first, order = timeline.works_of_call
    for i in blocking_copies(timeline).tolist():
        result[i] = work.end_ns[order[first[i] : first[i + 1]]].max()
    targets = sync_targets(timeline)
    for i in np.flatnonzero(np.isin(calls.kind, SYNCS)).tolist():
        last = targets.get(i, -1)
        # Nothing to wait for: the call still returned at some time, which is all tail.
        result[i] = work.end_ns[last] if last >= 0 else calls.start_ns[i]
    return result[index]


@once_per_timeline
def blocking_copies(timeline: Timeline) -> Ints:
    """Indices of the copy calls that return only when the copy is over: from or to pageable memory.

    A small pageable H2D copy is staged through a driver buffer and returns early: it blocks only where the call lasted
    through most of the copy (the last staged piece is still under way when it returns).
    """
    calls, work = timeline.calls, timeline.work
    rows = np.flatnonzero((work.memory == HostMemory.PAGEABLE) & (timeline.call_of_work >= 0))
    copying = timeline.call_of_work[rows]
    held = 2 * (calls.end_ns[copying] - work.start_ns[rows]) > work.end_ns[rows] - work.start_ns[rows]
    to_host = work.copy[rows] == CopyKind.D2H
    return np.unique(copying[held | to_host])


def _works(timeline: Timeline, index: Ints, waits: dict[int, int]) -> list[tuple[tuple[int, ...], ...]]:
    work = timeline.work
    latency, gap = start_costs(timeline, waits)
    first, order = timeline.works_of_call
    if not len(index):
        return []
    bounds = first[index[0] : index[-1] + 2]
    chosen = order[bounds[0] : bounds[-1]]
    rows = list(
        zip(
            chosen.tolist(),
            work.stream[chosen].tolist(),
            latency[chosen].tolist(),
            gap[chosen].tolist(),
            (work.end_ns - work.start_ns)[chosen].tolist(),
            (waits.get(row, -1) for row in chosen.tolist()),
            strict=True,
        )
    )
    return [tuple(rows[a:b]) for a, b in pairwise((bounds - bounds[0]).tolist())]


def _run(queue: _Queue, edits: Edits, rounds: int) -> list[int]:
    """The time at which each round was over on host and device."""
    clocks = [0] * len(queue.closing_ns)
    streams: dict[int, int] = {}
    ended: dict[int, int] = {}  # kept from round to round: the first calls of one wait for the last work of another
    ends: list[int] = []
    for _ in range(rounds):
        _run_round(queue, edits, clocks, streams, ended)
        ends.append(max(max(clocks), max(streams.values(), default=0)))
    return ends


def _run_round(
    queue: _Queue,
    edits: Edits,
    clocks: list[int],
    streams: dict[int, int],
    ended: dict[int, int],
) -> None:
    unblocked, dropped, saved, scale = edits.unblocked, edits.dropped, edits.host_saved_ns, edits.work_scale
    muted, graphed, awaited = edits.muted, edits.graphed, queue.awaited
    syncs = frozenset(int(k) for k in SYNCS)
    sync_device, sync_event = int(CallKind.SYNC_DEVICE), int(CallKind.SYNC_EVENT)
    for lane, before, own, tail, kind, stream, awaits, waits, works, call in zip(
        queue.lane, queue.before_ns, queue.own_ns, queue.tail_ns, queue.kind, queue.stream, queue.target,
        queue.waits, queue.works, queue.calls, strict=True,
    ):  # fmt: skip
        if call in saved:
            before = max(before - saved[call], 0)
        if call in dropped:
            continue
        if call in graphed:
            before, own = before if before > LAUNCH_PATH_NS else 0, GRAPHED_LAUNCH_NS
        if call in muted:
            clocks[lane] += before
            continue
        now = clocks[lane] + before
        done = 0
        for row, on, latency, gap, duration, after in works:
            if call in scale:
                duration = round(duration * scale[call])
            begin = max(now + latency, streams.get(on, -gap) + gap)
            if after in ended:
                begin = max(begin, ended[after])
            done = begin + duration
            streams[on] = done
            if row in awaited:
                ended[row] = done
        now += own
        if kind in syncs:
            if call not in unblocked:
                if kind == sync_device or (kind != sync_event and stream < 0):
                    target = max(streams.values(), default=0)
                elif kind == sync_event:
                    target = ended.get(awaits, 0)
                else:
                    target = streams.get(stream, 0)
                now = max(now, target) + tail
        elif waits:
            now = max(now, done) + tail if call not in unblocked else now
        clocks[lane] = now
