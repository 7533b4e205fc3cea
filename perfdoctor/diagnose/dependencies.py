"""What waited for what: work for work on another stream, and syncs for work, read off the schedule where need be.

A recording rarely says what an event wait waited for: event records are filtered out, and on CUDA 12.9 and later their
correlation is -1. But work that waited starts when what it waited for ends, much later than its launch and the work
before it on its own stream explain; and a host that waited goes on when what it waited for ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from perfdoctor.record.capture import CallKind, Ints
from perfdoctor.record.timeline import SYNCS, Timeline

_Answer = TypeVar("_Answer")

# A delay above this is not the latency of a launch; the end of the awaited work lies at most this far before the start.
UNEXPLAINED_NS = 30_000
_SIGNAL_NS = 30_000
_IDLE_START_NS = 5_000  # at least: from a launch to the start of a kernel on an idle device


def once_per_timeline(function: Callable[[Timeline], _Answer]) -> Callable[[Timeline], _Answer]:
    """Remembers a function's answer for as long as the timeline lives: several replays are built on one."""
    known: WeakKeyDictionary[Timeline, _Answer] = WeakKeyDictionary()

    def answer(timeline: Timeline) -> _Answer:
        if timeline not in known:
            known[timeline] = function(timeline)
        return known[timeline]

    return answer


@once_per_timeline
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


@once_per_timeline
def sync_targets(timeline: Timeline) -> dict[int, int]:
    """For each sync call the index of the last work that it waits for; -1 where there was none before it."""
    calls, work = timeline.calls, timeline.work
    syncs = np.flatnonzero(np.isin(calls.kind, SYNCS))
    streams = sync_streams(timeline)[syncs]
    last = np.full(len(syncs), -1, np.int64)
    for stream, rows in _launched_on(timeline).items():
        before = np.searchsorted(timeline.launch_ns[rows], calls.start_ns[syncs])
        newest = rows[np.maximum(before - 1, 0)]
        chosen = (before > 0) & ((streams < 0) | (streams == stream))
        chosen &= (last < 0) | (work.end_ns[newest] > work.end_ns[last])
        last = np.where(chosen, newest, last)
    return dict(zip(syncs.tolist(), last.tolist(), strict=True)) | event_targets(timeline)


@once_per_timeline
def event_targets(timeline: Timeline) -> dict[int, int]:
    """For each event sync the index of the work that it waits for; -1 where it found that work over.

    It is the work that ended while the host waited and just before it went on. No recording tells the stream of a
    record, and the stream launched on last was the wrong one in loops of three streams.
    """
    calls, work, launch = timeline.calls, timeline.work, timeline.launch_ns
    by_end = np.argsort(work.end_ns, kind="stable")
    ends = work.end_ns[by_end]
    found: dict[int, int] = {}
    for i in np.flatnonzero(calls.kind == CallKind.SYNC_EVENT).tolist():
        start, end = int(calls.start_ns[i]), int(calls.end_ns[i])
        found[i] = -1
        place = int(np.searchsorted(ends, end, side="right")) - 1
        while place >= 0 and ends[place] > start and end - ends[place] <= _SIGNAL_NS:
            if launch[by_end[place]] < start:
                found[i] = int(by_end[place])
                break
            place -= 1
    return found


def _launched_on(timeline: Timeline) -> dict[int, Ints]:
    """For each stream its work in the order of launch."""
    work, launch = timeline.work, timeline.launch_ns
    by_stream = {int(s): np.flatnonzero(work.stream == s) for s in np.unique(work.stream)}
    return {s: rows[np.argsort(launch[rows], kind="stable")] for s, rows in by_stream.items()}


@once_per_timeline
def sync_streams(timeline: Timeline) -> Ints:
    """The stream that each stream sync waits for; -1: unknown, the whole device, or another kind of call.

    Shape (num_calls,). A recording names it only in its `cuda_sync` rows. Without them a stream sync waits for the
    stream of the copy launched just before it on its thread (that is how `.item()` and `.cpu()` wait).
    """
    calls, syncs = timeline.calls, timeline.capture.stream_syncs
    named = syncs.correlation >= 0  # -1 is unknown and links nothing
    stream_of: dict[int, int] = dict(zip(syncs.correlation[named].tolist(), syncs.stream[named].tolist(), strict=True))
    nearby = _stream_before(timeline)
    streams = np.full(len(calls), -1, np.int64)
    for i in np.flatnonzero(calls.kind == CallKind.SYNC_STREAM).tolist():
        stream = stream_of.get(int(calls.correlation[i]), -1)
        streams[i] = stream if stream >= 0 else nearby[i]
    return streams


def _stream_before(timeline: Timeline) -> Ints:
    """For each call the stream on which its thread launched last; -1 before its first launch."""
    calls = timeline.calls
    first, order = timeline.works_of_call
    launching = np.flatnonzero(first[1:] > first[:-1])
    streams = np.full(len(calls), -1, np.int64)
    own = np.full(len(calls), -1, np.int64)
    own[launching] = timeline.work.stream[order[first[launching]]]
    for thread in np.unique(calls.thread):
        rows = np.flatnonzero(calls.thread == thread)
        newest = np.maximum.accumulate(np.where(own[rows] >= 0, np.arange(len(rows)), -1))
        streams[rows] = np.where(newest >= 0, own[rows][np.maximum(newest, 0)], -1)
    return streams


def start_costs(timeline: Timeline, waits: dict[int, int]) -> tuple[Ints, Ints]:
    """For each work: from its launch to its start on an idle stream, and from the end of the work before it.

    What the recording shows is kept (so the recorded schedule comes out again); where it shows only the other of the
    two, or a wait for another stream, the median of all stands in.
    """
    work, launch = timeline.work, timeline.launch_ns
    previous = ends_before(timeline)
    waited = np.zeros(len(work), bool)
    waited[list(waits)] = True
    plain = (timeline.call_of_work >= 0) & ~waited
    idle = launch >= previous
    delay, space = work.start_ns - launch, np.maximum(work.start_ns - previous, 0)
    usual_delay = int(np.median(delay[idle & plain])) if (idle & plain).any() else _IDLE_START_NS
    usual_space = int(np.median(space[~idle & plain])) if (~idle & plain).any() else 1_000
    # On a single stream nothing recorded can hold work back longer than this: a stalled clock, another process. With
    # several streams the cause was one of them, though the schedule does not say which: the delay is kept.
    several = len(np.unique(work.stream)) > 1
    longest_delay = np.iinfo(np.int64).max if several else 4 * usual_delay
    longest_space = np.iinfo(np.int64).max if several else 4 * usual_space + 1_000
    latency = np.where(idle & ~waited, np.clip(delay, 0, longest_delay), usual_delay)
    gap = np.where(idle | waited, usual_space, np.minimum(space, longest_space))
    return latency, gap
