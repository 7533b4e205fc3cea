"""The pointer table on the device, and the launches that read it.

A table is found by its content: the address, size and type of every gradient, read again before each launch. A launch
over addresses that were not checked can fault on freed memory, so there is no other way in; only inside a CUDA graph
capture is the table fixed, because there the addresses are.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perfdoctor.kernels import walker
from perfdoctor.kernels.captured_tables import CapturedTables
from perfdoctor.kernels.work_list import TILE, WorkList, cut

L2, ABS_MAX = 0, 1
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_KEPT_TABLES = 16
_KEPT_LISTS = 64
_INTERPRETED_PROGRAMS = 3
NORM_PROGRAMS = 3
_KEPT_SHARE = 0.5  # of the L2 cache


@dataclass(slots=True, kw_only=True)
class GradTable:
    """The gradients of one device, ready to be read by the kernels, on one stream.

    The scratch belongs to the table: launches over it must follow each other on its stream, and those of one call must
    not be parted by another thread's: `lock` is held around them.
    """

    walk: Any
    """compares what the table was built for with what is there now (see `walker`)"""
    work: WorkList
    device: torch.device
    stream: int
    user_stream: Any
    """the torch stream of that handle; None on the CPU"""
    slots: Tensor
    """int64 [num_slots, 2]"""
    first_part: Tensor
    num_elements: Tensor
    program_parts: Tensor
    """float64 [4 * programs]"""
    counter: Tensor
    """int32 [1], zero between launches"""
    coefficient: Tensor
    """float32 []: min(1, max_norm / (norm + 1e-6)) of the last norm"""
    num_kept: int
    """chunks from the front that may stay in the L2 cache"""
    lock: Any = field(default_factory=threading.RLock)
    parts: Tensor | None = None
    """float64 [4, num_parts], made when statistics are first asked for"""
    counts: Tensor | None = None
    """int64 [num_tensors], zero between launches; made when non-finite values are first looked for"""
    launches: dict[Any, Any] = field(default_factory=dict)
    """prepared launches, by kernel"""
    per_multiprocessor: int | None = None
    """programs a multiprocessor, where a benchmark tries another number than the kernel's own"""
    scale_span: int = 4 * TILE
    """words that a program of the scaling kernel has in flight"""
    scale_store: str = ""
    """the cache modifier of its stores"""

    @property
    def is_empty(self) -> bool:
        return self.work.num_slots == 0

    def programs(self, per_multiprocessor: int, num_items: int) -> int:
        """How many programs share the items: as many as are resident at once, or fewer."""
        per_multiprocessor = self.per_multiprocessor or per_multiprocessor
        return min(num_items, _multiprocessors(self.device) * per_multiprocessor)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kept_bytes(device: torch.device) -> float:
    """What of the gradients may stay in the L2 cache."""
    if device.type == "cpu":
        return 0.0
    return _KEPT_SHARE * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)


MAX_PER_MULTIPROCESSOR = 8


def unique_rows(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Without missing gradients, and without a parameter's second mention: it counts once, and is scaled once."""
    rows = rows[rows[:, 2] != walker.NO_GRADIENT]
    addresses = np.sort(rows[rows[:, 1] > 0, 0])
    if (addresses[1:] != addresses[:-1]).all():
        return rows
    _, first = np.unique(rows, axis=0, return_index=True)
    again = np.ones(len(rows), dtype=bool)
    again[first] = False
    again &= (rows[:, 2] & walker.OF_PARAMETER != 0) & (rows[:, 1] > 0)
    return rows[~again]


@functools.lru_cache(maxsize=_KEPT_TABLES)
def _cut_alike(alignments: bytes, num_elements: bytes, elements: bytes, words: int | None, programs: int) -> WorkList:
    """The work list for all gradients of these sizes and alignments: when they only moved, it is there already."""
    alignment, count, element = (np.frombuffer(part, dtype=np.int64) for part in (alignments, num_elements, elements))
    return cut(alignment, count, element, words, programs)


def build_table(rows: Tensor, device: torch.device, stream: int, words: int | None = None) -> GradTable:
    """A table for these rows, uploaded without a wait for the device (outside of graph captures)."""
    unique = unique_rows(rows.numpy())
    addresses, num_elements = np.ascontiguousarray(unique[:, 0]), np.ascontiguousarray(unique[:, 1])
    programs = _multiprocessors(device) * NORM_PROGRAMS
    sizes = ((addresses % 16).tobytes(), num_elements.tobytes(), (unique[:, 2] & 3).tobytes())
    work = _cut_alike(*sizes, words, programs)
    columns = [work.slots_at(addresses).reshape(-1), work.first_part, work.num_elements]
    starts, at = [], 0
    for column in columns:
        starts.append(at)
        at += (len(column) + 1) // 2 * 2  # every column starts on 16 bytes: the kernels were compiled for that
    host = np.zeros(at, dtype=np.int64)
    for start, column in zip(starts, columns, strict=True):
        host[start : start + len(column)] = column
    num_programs = max(1, min(max(work.num_items, work.num_slots), _multiprocessors(device) * MAX_PER_MULTIPROCESSOR))
    # From pinned memory the copy does not make the host wait; torch keeps that memory until the copy is done.
    pinned = device.type == "cuda" and not is_capturing(device)
    with _upload_stream(device):
        source = torch.from_numpy(host)
        table = (source.pin_memory() if pinned else source).to(device, non_blocking=pinned)
        program_parts = torch.empty(4 * num_programs, dtype=torch.float64, device=device)
        counter = torch.zeros(1, dtype=torch.int32, device=device)
        coefficient = torch.ones((), dtype=torch.float32, device=device)
    return GradTable(
        walk=walker.walk_of(rows),
        work=work,
        device=device,
        stream=stream,
        user_stream=torch.cuda.current_stream(device) if device.type == "cuda" else None,
        slots=table[: 2 * work.num_slots],
        first_part=table[starts[1] : starts[1] + len(columns[1])],
        num_elements=table[starts[2] : starts[2] + len(columns[2])],
        program_parts=program_parts,
        counter=counter,
        coefficient=coefficient,
        num_kept=work.num_leading_chunks(_kept_bytes(device)),
    )


def room_for_stats(table: GradTable) -> tuple[Tensor, Tensor, Tensor]:
    """`table.parts`, made where the table was made; float32 [4, num_tensors + 1]; int64 [num_tensors + 1]."""
    if table.parts is None:
        with _upload_stream(table.device):
            table.parts = torch.empty(4 * table.work.num_parts, dtype=torch.float64, device=table.device)
    num_columns = len(table.work.num_elements) + 1
    out = torch.empty((4, num_columns), dtype=torch.float32, device=table.device)
    return table.parts, out, torch.empty(num_columns, dtype=torch.int64, device=table.device)


def zero_counts(table: GradTable) -> Tensor:
    """`table.counts`, made where the table was made."""
    if table.counts is None:
        with _upload_stream(table.device):
            table.counts = torch.zeros(len(table.work.num_elements), dtype=torch.int64, device=table.device)
        if table.device.type == "cuda" and not is_capturing(table.device):
            table.counts.record_stream(table.user_stream)  # the table may have been forgotten, and freed, already
    return table.counts


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def is_capturing(device: torch.device) -> bool:
    """Whether that device's current stream is in a CUDA graph capture."""
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def _upload_stream(device: torch.device) -> Iterator[None]:
    """Tables are made on a stream of their own, so that none lies in the private memory pool of a CUDA graph.

    In a graph capture the host waits for the upload; the graph itself holds no copy then.
    No tensor of theirs is an inference tensor: they outlive the mode.
    """
    if device.type == "cpu":
        with torch.inference_mode(False):
            yield
        return
    capturing = is_capturing(device)
    side = _side_stream(device)
    user = torch.cuda.current_stream(device)
    with relaxed_capture() if capturing else contextlib.nullcontext():
        with torch.cuda.stream(side), torch.inference_mode(False):
            yield
        if capturing:
            side.synchronize()
        else:
            user.wait_stream(side)


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Lets this thread allocate, load kernels and use other streams while a graph capture is on."""
    if torch.version.cuda is None:
        yield
        return
    driver = ctypes.CDLL("libcuda.so.1")
    mode = ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class TableCache:
    """The tables in use, found by what they point at. Several threads may ask at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by_content: OrderedDict[tuple[Any, ...], GradTable] = OrderedDict()
        self._recent: dict[tuple[Any, ...], GradTable] = {}
        self._captured = CapturedTables()

    def find_recent(self, items: list[Tensor], always_grad: bool) -> GradTable | None:
        """The table of the last call with this list, if every gradient still lies where it was."""
        if not items:
            return None
        table = self._recent.get((len(items), id(items[0]), id(items[-1]), always_grad))
        if table is None or current_stream(table.device) != table.stream or is_capturing(table.device):
            return None
        return table if table.walk.matches(items, always_grad) else None

    def find(self, items: list[Tensor], always_grad: bool, rows: Tensor, device: torch.device) -> GradTable:
        """The table of these rows, found or built."""
        stream = current_stream(device)
        content = (device, stream, rows.numpy().tobytes())
        if is_capturing(device):
            return self._captured.find(content, lambda: build_table(rows, device, stream))
        with self._lock:
            found = self._by_content.get(content)
            if found is None:
                found = self._by_content[content] = build_table(rows, device, stream)
                while len(self._by_content) > _KEPT_TABLES:
                    self._forget(self._by_content.popitem(last=False)[1])
            self._by_content.move_to_end(content)
            if items:
                if len(self._recent) >= _KEPT_LISTS:
                    self._recent.clear()  # lists that are made anew for each call would pile up
                self._recent[(len(items), id(items[0]), id(items[-1]), always_grad)] = found
            return found

    def clear(self) -> None:
        """Forgets all tables but those that a graph may replay."""
        with self._lock:
            for table in self._by_content.values():
                self._free(table)
            self._by_content.clear()
            self._recent.clear()

    def _forget(self, table: GradTable) -> None:
        self._recent = {key: kept for key, kept in self._recent.items() if kept is not table}
        self._free(table)

    def _free(self, table: GradTable) -> None:
        """The memory was made on another stream than the one that reads it: it may go once that one is done."""
        if table.device.type == "cuda":
            scratch = (table.program_parts, table.counter, table.coefficient, table.parts, table.counts)
            for tensor in (table.slots, *scratch):
                if tensor is not None:
                    tensor.record_stream(table.user_stream)


def current_stream(device: torch.device) -> int:
    """The handle of the device's current stream; 0 for the CPU."""
    if device.type == "cpu":
        return 0
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def stream_reader(device: torch.device) -> Callable[[], int]:
    """`current_stream` of one device, at the cost of one call into C."""
    read = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if device.type == "cpu" or read is None:  # a build without CUDA has nothing but stream 0
        return int
    return functools.partial(read, device.index)


def device_of(rows: Tensor) -> torch.device | None:
    """The one device of all rows, None where there are several or none."""
    codes = rows[rows[:, 2] != walker.NO_GRADIENT, 2] >> 32
    if len(codes) == 0 or bool((codes != codes[0]).any()):
        return None
    index = int(codes[0]) - 1
    return torch.device("cpu") if index < 0 else torch.device("cuda", index)
