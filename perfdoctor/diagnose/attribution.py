"""Which line, and which kind of call, every sync and every blocking copy of a recording belongs to.

The live hooks know exact lines and join the recording by time. A recording alone knows ops (the kind) and, with Python
frames, functions (a line that is the function's, marked inexact).
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfdoctor.diagnose.replay import blocking_copies
from perfdoctor.record import owners
from perfdoctor.record.capture import CallKind, Capture, CopyKind, Frame, HostMemory, Ints, Phase, Site, Spans
from perfdoctor.record.sync_kinds import ALLOCATOR, BLOCKING_COPY, HOST_SYNC, KINDS, PAGEABLE_COPY
from perfdoctor.record.timeline import SYNCS, Timeline

# Folders under which libraries appear in traces, which name files from their package on.
_LIBRARY_FOLDERS = frozenset(
    ("torch", "triton", "pytorch_lightning", "lightning", "transformers", "accelerate", "torchmetrics", "wandb", "tqdm")
)
# torch hands a sync warning over when its C++ function returns; one from backward, when backward() does.
_HIT_REACH_NS = 100_000_000
_MOST_HITS = 64
# A hit that names the other direction (a read that also sends its index) is the call's where it comes at once.
_NEAR_NS = 1_000_000

# Codes of hits that are a sync or a copy; others mark a line, a collection, a race.
_WAITING = (HOST_SYNC, PAGEABLE_COPY, BLOCKING_COPY, ALLOCATOR)

# Innermost first: what the op that encloses a sync says of its kind.
_KIND_OF_OP = (
    (re.compile(r"aten::(is_nonzero|__bool__)"), "tensor_to_bool"),
    (re.compile(r"aten::(masked_select)"), "masked_select"),
    (re.compile(r"aten::(index|index_put_?|_index_put_impl_)$"), "boolean_mask"),
    (re.compile(r"aten::(_?unique\w*)"), "unique"),
    (re.compile(r"aten::one_hot"), "one_hot"),
    (re.compile(r"aten::bincount"), "bincount"),
    (re.compile(r"aten::repeat_interleave"), "repeat_interleave"),
    (re.compile(r"aten::(nonzero|argwhere)"), "nonzero"),
    (re.compile(r"aten::_?ctc_loss"), "ctc_loss"),
    (re.compile(r"aten::(_local_scalar_dense|item)"), "item"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGroup:
    """Calls that one line makes for one reason. `place` is None where the recording does not tell the line."""

    kind: str  # a name of KINDS
    place: Site | None
    calls: tuple[int, ...]  # syncs and blocking copies, indices into Timeline.calls
    copies: tuple[int, ...]  # the copy calls among them or just before them


def sync_groups(timeline: Timeline, first: int, last: int) -> tuple[SyncGroup, ...]:
    """The syncs and blocking copies among calls `[first, last)`, grouped by line and kind, most calls first."""
    calls = timeline.calls
    blocking = set(blocking_copies(timeline).tolist())
    pageable = set(_pageable_copies(timeline).tolist())
    syncs, launches = frozenset(map(int, SYNCS)), (int(CallKind.LAUNCH), int(CallKind.GRAPH_LAUNCH))
    memcpy = int(CallKind.MEMCPY)
    places = _Places(timeline)
    groups: dict[tuple[str, Site | None], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    copy_before: dict[int, int] = {}
    for i, kind, thread in zip(
        range(first, last), calls.kind[first:last].tolist(), calls.thread[first:last].tolist(), strict=True
    ):
        if kind == memcpy:
            copy_before[thread] = i
            if i in blocking or i in pageable:
                held, copies = groups[places.of(i, i)]
                held.append(i)
                copies.append(i)
        elif kind in syncs:
            copy = copy_before.pop(thread, -1)
            held, copies = groups[places.of(i, copy)]
            held.append(i)
            if copy >= 0:
                copies.append(copy)
        elif kind in launches:
            copy_before.pop(thread, None)
    found = (
        SyncGroup(kind=meaning, place=place, calls=tuple(held), copies=tuple(dict.fromkeys(copies)))
        for (meaning, place), (held, copies) in groups.items()
    )
    return tuple(sorted(found, key=lambda group: -len(group.calls)))


def _of_code(capture: Capture, *codes: str) -> NDArray[np.bool_]:
    """A mask over strings: kinds of these codes. A kind that this version does not know is a sync."""
    return capture.matching(lambda text: (KINDS[text].code if text in KINDS else HOST_SYNC) in codes)


def _pageable_copies(timeline: Timeline) -> Ints:
    work = timeline.work
    rows = (work.memory == HostMemory.PAGEABLE) & (work.copy == CopyKind.H2D) & (timeline.call_of_work >= 0)
    return np.unique(timeline.call_of_work[rows])


class _Places:
    """Looks up the kind and the site of a sync call."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        capture = timeline.capture
        hits = capture.hits
        live = np.flatnonzero(np.isin(hits.phase, (Phase.LIGHT, Phase.FULL)) & (hits.site >= 0) & (hits.kind >= 0))
        live = live[_of_code(capture, *_WAITING)[hits.kind[live]]] if len(live) else live
        self.hits = live[np.argsort(hits.end_ns[live], kind="stable")]
        self.hit_ends = hits.end_ns[self.hits]
        self.copies_to_device = _of_code(capture, PAGEABLE_COPY, BLOCKING_COPY)
        self.ops = _Enclosing(capture.ops)
        self.frames = _Enclosing(capture.frames)
        self._sites: dict[str, Site | None] = {}

    def of(self, call: int, copy: int) -> tuple[str, Site | None]:
        hit = self._hit(call, copy)
        if hit >= 0:
            capture = self.timeline.capture
            return capture.text(int(capture.hits.kind[hit])), capture.sites[int(capture.hits.site[hit])]
        return self._kind(call, copy), self._place(call)

    def _hit(self, call: int, copy: int) -> int:
        """The first fitting hit that came in at or after the end of the call; -1 where none did soon."""
        hits, end = self.timeline.capture.hits, int(self.timeline.calls.end_ns[call])
        to_device = self._copy(copy)[0] == CopyKind.H2D
        first = int(np.searchsorted(self.hit_ends, end, side="left"))
        near = -1
        for place in range(first, min(first + _MOST_HITS, len(self.hits))):
            hit, late = int(self.hits[place]), int(self.hit_ends[place]) - end
            if late > _HIT_REACH_NS:
                break
            if hits.start_ns[hit] < hits.end_ns[hit]:
                # It knows how long its own call took: this one, or another.
                if hits.start_ns[hit] <= end:
                    return hit
            elif self.copies_to_device[hits.kind[hit]] == to_device:
                return hit
            elif near < 0 and late <= _NEAR_NS:
                near = hit
        return near

    def _kind(self, call: int, copy: int) -> str:
        timeline = self.timeline
        kind = timeline.calls.kind[call]
        if kind in (CallKind.SYNC_DEVICE, CallKind.SYNC_EVENT):
            return "cuda_synchronize"
        direction, memory = self._copy(copy)
        if direction == CopyKind.H2D:
            return "h2d_pageable" if memory != HostMemory.PINNED else "h2d_blocking"
        for name in self.ops.names(timeline, call):
            for pattern, meaning in _KIND_OF_OP:
                if pattern.match(name):
                    return meaning
        if direction == CopyKind.D2H:
            return "item" if self._bytes(copy) <= 8 and memory != HostMemory.PAGEABLE else "cpu"
        return "other_sync" if copy >= 0 or len(timeline.capture.ops) else "cuda_synchronize"

    def _copy(self, copy: int) -> tuple[int, int]:
        if copy < 0:
            return CopyKind.NONE, HostMemory.UNKNOWN
        first, order = self.timeline.works_of_call
        rows = order[first[copy] : first[copy + 1]]
        if not len(rows):
            return CopyKind.NONE, HostMemory.UNKNOWN
        return int(self.timeline.work.copy[rows[0]]), int(self.timeline.work.memory[rows[0]])

    def _bytes(self, copy: int) -> int:
        first, order = self.timeline.works_of_call
        return int(self.timeline.work.num_bytes[order[first[copy] : first[copy + 1]]].sum())

    def _place(self, call: int) -> Site | None:
        names = tuple(self.frames.names(self.timeline, call))
        key = "\n".join(names)
        if key not in self._sites:
            self._sites[key] = site_of_frames(names)
        return self._sites[key]


_FRAME = re.compile(r"^(?P<file>.+?)\((?P<line>\d+)\): (?P<function>.+)$")


def site_of_frames(names: tuple[str, ...]) -> Site | None:
    """The site that the frame rows of a trace tell, innermost first: the line of the *function*, so inexact."""
    frames = []
    for name in names:
        match = _FRAME.match(name)
        if match:
            file = match["file"]
            frames.append(
                Frame(file=file, line=int(match["line"]), function=match["function"], owner=_trace_owner(file))
            )
    own = [frame for frame in frames if frame.owner == "user"]
    if not own:  # the frame of a script's own top level began before the recording and is not in it
        return None
    return Site(
        frame=own[0],
        library=frames[0] if frames[0].owner != "user" else None,
        caller=own[1] if len(own) > 1 else None,
        exact=False,
    )


def _trace_owner(file: str) -> str:
    """The owner of a file as a trace writes it: relative to the folder of `sys.path` that it came from."""
    package = file.replace("\\", "/").split("/", 1)[0]
    if "/" not in file and package.removesuffix(".py") in sys.stdlib_module_names:
        return owners.PYTHON
    return owners.file_owner("/site-packages/" + file) if package in _LIBRARY_FOLDERS else owners.file_owner(file)


class _Enclosing:
    """The spans around a moment on a thread, innermost first. Spans of a thread nest."""

    def __init__(self, spans: Spans) -> None:
        self.spans = spans
        self._threads: dict[int, tuple[Ints, Ints]] = {}

    def names(self, timeline: Timeline, call: int) -> list[str]:
        calls = timeline.calls
        rows, parents = self._of_thread(int(calls.thread[call]))
        if not len(rows):
            return []
        start = int(calls.start_ns[call])
        place = int(np.searchsorted(self.spans.start_ns[rows], start, side="right")) - 1
        found = []
        while place >= 0:
            if self.spans.end_ns[rows[place]] >= start:
                found.append(timeline.capture.text(int(self.spans.name[rows[place]])))
            place = int(parents[place])
        return found

    def _of_thread(self, thread: int) -> tuple[Ints, Ints]:
        if thread not in self._threads:
            rows = np.flatnonzero(self.spans.thread == thread)
            rows = rows[np.lexsort((-self.spans.end_ns[rows], self.spans.start_ns[rows]))]
            self._threads[thread] = rows, _parents(self.spans.end_ns[rows], self.spans.start_ns[rows])
        return self._threads[thread]


def _parents(ends: Ints, starts: Ints) -> Ints:
    parents = np.full(len(ends), -1, np.int64)
    stack: list[int] = []
    for place, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        while stack and ends[stack[-1]] <= start:
            stack.pop()
        parents[place] = stack[-1] if stack else -1
        if end > start:
            stack.append(place)
    return parents
