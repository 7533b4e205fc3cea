"""The tables of a recording: equally long numpy columns, one class for each kind of row, and what their codes mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class CallKind(IntEnum):
    """What a CUDA (or HIP) API call on the host does."""

    OTHER = 0
    LAUNCH = 1
    GRAPH_LAUNCH = 2
    MEMCPY = 3
    MEMSET = 4
    SYNC_DEVICE = 5
    SYNC_STREAM = 6
    SYNC_EVENT = 7
    EVENT_RECORD = 8
    STREAM_WAIT = 9
    MALLOC = 10
    FREE = 11


class WorkKind(IntEnum):
    """What the device did."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    GRAPH = 3  # a whole CUDA graph as one row: its kernels were not recorded


class CopyKind(IntEnum):
    """Direction of a copy; NONE on rows that are no copies."""

    NONE = 0
    H2D = 1
    D2H = 2
    D2D = 3
    H2H = 4
    P2P = 5


class HostMemory(IntEnum):
    """The host side of a copy."""

    UNKNOWN = 0
    PAGEABLE = 1
    PINNED = 2


class RangeKind(IntEnum):
    """Who opened a range."""

    USER = 0  # NVTX, record_function
    STEP = 1  # ProfilerStep#N, an NVTX step range
    PHASE = 2  # a phase that names itself: data, forward, backward, optimizer, ...


class Phase(IntEnum):
    """The phase of a live session in which a hit was seen."""

    SITES = 0
    LIGHT = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class Columns:
    """A table as equally long numpy columns. Subclasses name the columns; all are int64."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def __post_init__(self) -> None:
        lengths = {f.name: len(getattr(self, f.name)) for f in fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of {type(self).__name__} differ in length: {lengths}")

    @classmethod
    def empty(cls) -> Self:
        return cls(**{f.name: np.empty(0, np.int64) for f in fields(cls)})

    @classmethod
    def of(cls, columns: Mapping[str, Ints]) -> Self:
        """Those of `columns` that this table has."""
        return cls(**{field.name: columns[field.name] for field in fields(cls)})

    @classmethod
    def from_rows(cls, rows: Iterable[Iterable[int]]) -> Self:
        """Rows of Python integers in the order of the fields: for tests and small tables."""
        table = np.array([tuple(row) for row in rows], np.int64).reshape(-1, len(fields(cls)))
        return cls(**{f.name: np.ascontiguousarray(table[:, i]) for i, f in enumerate(fields(cls))})

    def take(self, index: NDArray[Any]) -> Self:
        """The rows that a mask or an index array picks."""
        return type(self)(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def columns(self) -> dict[str, Ints]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls(Columns):
    """CUDA API calls on the host: launches, copies, syncs, allocations. `correlation` is -1 where unknown."""

    start_ns: Ints
    end_ns: Ints
    thread: Ints
    name: Ints
    kind: Ints  # CallKind
    correlation: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Columns):
    """What ran on the device: kernels, copies, memsets. Several rows may share the correlation of one graph launch."""

    start_ns: Ints
    end_ns: Ints
    device: Ints
    stream: Ints
    name: Ints
    kind: Ints  # WorkKind
    correlation: Ints  # of the launching call, -1 where unknown
    num_bytes: Ints  # copies and memsets; -1 where unknown
    copy: Ints  # CopyKind
    memory: Ints  # HostMemory
    blocks: Ints  # grid size in thread blocks; -1 where unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans(Columns):
    """Nested host spans on a thread: ops (`aten::`) and Python frames."""

    start_ns: Ints
    end_ns: Ints
    thread: Ints
    name: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges(Columns):
    """Named ranges: NVTX, record_function, ProfilerStep."""

    start_ns: Ints
    end_ns: Ints
    thread: Ints
    name: Ints
    kind: Ints  # RangeKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSyncs(Columns):
    """`cuda_sync` rows and Nsight's SYNCHRONIZATION rows: what a sync waited for."""

    start_ns: Ints
    end_ns: Ints
    kind: Ints  # CallKind: SYNC_* or STREAM_WAIT
    stream: Ints  # -1 for the whole device
    correlation: Ints  # of the host call
    record_correlation: Ints  # of the cudaEventRecord waited for; -1 where unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits(Columns):
    """One row for each sync or copy that the live hooks caught. `site` indexes `Capture.sites`."""

    start_ns: Ints
    end_ns: Ints  # equal to start_ns where only the moment is known
    thread: Ints
    site: Ints
    kind: Ints  # index into Capture.strings: a name of sync_kinds.KINDS
    step: Ints  # index into Capture.steps of the same phase; -1 outside the steps
    phase: Ints  # Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples(Columns):
    """Where the loop's thread was, now and then: one row for each look at its stack."""

    time_ns: Ints
    thread: Ints
    site: Ints  # index into Capture.sites


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps(Columns):
    """One row for each step (optimizer update) on the host clock."""

    start_ns: Ints
    end_ns: Ints
    index: Ints  # the loop's own count
    micro_batches: Ints  # 0 where unknown
    samples: Ints  # -1 where unknown
    complete: Ints  # 0 for a step that an exception or the end of the recording cut short
    partial: Ints  # 1 for a step on a short batch: marked, and left out of medians


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses(Columns):
    """Host pauses seen by hooks: garbage collections, waits for the next batch, worker starts."""

    start_ns: Ints
    end_ns: Ints
    thread: Ints
    name: Ints  # 'gc:2', 'data', 'worker-start', ...
    step: Ints
    amount: Ints  # objects collected, ...; -1 where it has none
