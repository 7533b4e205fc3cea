"""The clocks of several ranks brought onto one, by what all of them do at once: the ends of common collectives.

A collective lets every rank go at the same moment (within microseconds), however early each had come. The difference
between two clocks is therefore the median difference between the ends of the same collectives. Numbers only: numpy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfdoctor.record.capture import Capture, Ints, WorkKind
from perfdoctor.record.kernel_names import KernelClass, kernel_class
from perfdoctor.record.timeline import Timeline, step_index

# Collectives that the CPU runs: their ranges last until they are done. The ranges `nccl:...` only cover the launch.
_HOST_COLLECTIVE = re.compile(r"^(gloo|mpi):(?!send|recv|barrier)")
# Nobody may leave these before everybody has come. From others (broadcast, reduce) the sender may leave at once.
_SYMMETRIC = re.compile(r"all_?reduce|reduce_?scatter|all_?gather|all_?to_?all|send_?recv", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The collectives of one rank in the order of their start. Shapes (n,).

    `step` is the loop's own count of the step that launched each, -1 outside the steps or where none are marked.
    """

    names: tuple[str, ...]
    start_ns: Ints
    end_ns: Ints
    step: Ints
    num_steps: int

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """The same collectives on all ranks, on the first rank's clock.

    `offset_ns[r]`: what rank r's clock is ahead of the first rank's. `start_ns`, `end_ns`: shape (ranks, collectives),
    aligned. `spread_ns[r]`: median distance between the aligned ends and the first rank's: how sure the offset is.
    """

    offset_ns: tuple[int, ...]
    spread_ns: tuple[int, ...]
    start_ns: Ints
    end_ns: Ints
    num_steps: int  # that these collectives belong to

    @property
    def num_common(self) -> int:
        """Collectives that every rank recorded."""
        return int(self.start_ns.shape[1])


def collectives(timeline: Timeline) -> Collectives:
    """The collectives of a recording: communication kernels, or where none ran the host's own (gloo)."""
    work, capture = timeline.work, timeline.capture
    chosen = capture.matching(lambda name: kernel_class(name) == KernelClass.COMMUNICATION)
    rows = np.flatnonzero(chosen[work.name] & (work.kind == WorkKind.KERNEL)) if len(work) else np.empty(0, np.int64)
    if len(rows):
        names = tuple(_short(capture.text(int(name))) for name in work.name[rows])
        return _of_steps(timeline, names, work.start_ns[rows], work.end_ns[rows], timeline.launch_ns[rows])
    for source in (capture, capture.full):
        found = None if source is None else _host_collectives(source)
        if found is not None and len(found):
            return found
    empty = np.empty(0, np.int64)
    return Collectives(names=(), start_ns=empty, end_ns=empty, step=empty, num_steps=0)


def _host_collectives(capture: Capture) -> Collectives:
    chosen = capture.matching(lambda name: bool(_HOST_COLLECTIVE.match(name)))
    ranges = capture.ranges
    rows = np.flatnonzero(chosen[ranges.name]) if len(ranges) else np.empty(0, np.int64)
    rows = rows[np.argsort(ranges.start_ns[rows], kind="stable")]
    starts, ends = ranges.start_ns[rows], ranges.end_ns[rows]
    names = tuple(capture.text(int(name)) for name in ranges.name[rows])
    return _of_steps(Timeline(capture), names, starts, ends, starts)


def _of_steps(timeline: Timeline, names: tuple[str, ...], starts: Ints, ends: Ints, launched: Ints) -> Collectives:
    steps = timeline.steps
    own = np.full(len(names), -1, np.int64)
    if steps is not None and steps.origin == "marks":
        at = step_index(steps.host_start_ns, launched)
        inside = (at >= 0) & (launched < steps.host_end_ns[np.maximum(at, 0)])
        own = np.where(inside, timeline.capture.steps.index[steps.index[np.maximum(at, 0)]], -1)
    num_steps = len(steps) if steps is not None else 0
    return Collectives(names=names, start_ns=starts, end_ns=ends, step=own, num_steps=num_steps)


def align(ranks: Sequence[Collectives]) -> Alignment | None:
    """The common clock of at least two ranks; None where they share no collective.

    Collectives are the same where step, name and occurrence in the step are. Ranks whose steps are not marked, or count
    differently, are matched over the whole recording, from its beginning or from its end: whichever fits.
    """
    if len(ranks) < 2:
        return None
    steps = set.intersection(*(set(rank.step[rank.step >= 0].tolist()) for rank in ranks))
    if steps:
        found = _aligned(ranks, _matched([_keys_by_step(rank, steps) for rank in ranks]), len(steps))
        if found is not None:
            return found
    num_steps = max(min(rank.num_steps for rank in ranks), 1)
    ways = [
        _aligned(ranks, _matched([_keys(rank, from_end=from_end) for rank in ranks]), num_steps)
        for from_end in (False, True)
    ]
    possible = [way for way in ways if way is not None]
    return min(possible, key=lambda way: max(way.spread_ns)) if possible else None


def _keys_by_step(rank: Collectives, steps: set[int]) -> dict[tuple[int, str, int], int]:
    """Row of each (step, name, occurrence in the step)."""
    counts: dict[tuple[int, str], int] = {}
    table: dict[tuple[int, str, int], int] = {}
    for row, (step, name) in enumerate(zip(rank.step.tolist(), rank.names, strict=True)):
        if step in steps:
            counts[step, name] = counts.get((step, name), 0) + 1
            table[step, name, counts[step, name]] = row
    return table


def _keys(rank: Collectives, *, from_end: bool) -> dict[tuple[int, str, int], int]:
    """Row of each (0, name, occurrence in the recording), counted from its beginning or its end."""
    counts: dict[str, int] = {}
    table: dict[tuple[int, str, int], int] = {}
    rows = range(len(rank))
    for row in reversed(rows) if from_end else rows:
        name = rank.names[row]
        counts[name] = counts.get(name, 0) + 1
        table[0, name, counts[name]] = row
    return table


def _matched(tables: Sequence[dict[tuple[int, str, int], int]]) -> list[tuple[int, ...]]:
    """The rows of the same collective on every rank, in the order of the first rank."""
    common = (key for key in tables[0] if all(key in table for table in tables[1:]))
    return sorted(tuple(table[key] for table in tables) for key in common)


def _aligned(ranks: Sequence[Collectives], matched: list[tuple[int, ...]], num_steps: int) -> Alignment | None:
    if not matched:
        return None
    rows = np.array(matched, np.int64).T
    starts = np.array([rank.start_ns[row] for rank, row in zip(ranks, rows, strict=True)])
    ends = np.array([rank.end_ns[row] for rank, row in zip(ranks, rows, strict=True)])
    symmetric = np.array([bool(_SYMMETRIC.search(ranks[0].names[row])) for row in rows[0]])
    judged = symmetric if symmetric.any() else np.ones(len(rows[0]), bool)
    apart = (ends - ends[0])[:, judged]
    offsets = np.round(np.median(apart, axis=1)).astype(np.int64)
    spread = np.round(np.median(np.abs(apart - offsets[:, None]), axis=1)).astype(np.int64)
    return Alignment(
        offset_ns=tuple(offsets.tolist()),
        spread_ns=tuple(spread.tolist()),
        start_ns=starts - offsets[:, None],
        end_ns=ends - offsets[:, None],
        num_steps=num_steps,
    )


def _short(name: str) -> str:
    # ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>): ranks may differ in the protocol.
    found = re.match(r"\w*?nccl\w*?Kernel\w*?_([A-Za-z]+)", name)
    return found.group(1) if found else name.partition("(")[0]
