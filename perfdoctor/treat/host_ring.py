"""Small device tensors on their way to the host: copied on a side stream into pinned memory, read once they are there.

    device slot --(event "ready")--> side stream: copy --(event "copied")--> pinned slot --> list of numbers

Each slot has its own device memory, pinned memory and events, so that nothing in flight is ever written again: a slot
is free once its "copied" event was seen, and is asked by `query()`, which does not wait.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from perfdoctor.kernels.pointer_table import is_capturing, stream_reader
from perfdoctor.kernels.walker import compiled_walker
from perfdoctor.watch.device_events import new_event


class HostRing:
    """`num_slots` copies of tensors like `like` may be in flight at once. On the CPU everything arrives at once.

    Where the compiled walker is there, a copy costs the host four driver calls in one; torch's stream context, copy and
    events around them are ten times that in Python.
    """

    def __init__(self, like: Tensor, num_slots: int) -> None:
        self._device = like.device
        self._on_gpu = like.device.type == "cuda"
        block = torch.empty((num_slots, *like.shape), dtype=like.dtype, device=like.device)
        self.sources = list(block.unbind())
        self.addresses: list[int] = []
        """of the sources, where the compiled walker sends them"""
        self._targets = self.sources
        self._arrays: list[Any] = []
        self._walker: Any = None
        self._handles: list[tuple[int, ...]] = []
        self._stream = stream_reader(like.device)
        if self._on_gpu:
            pinned = torch.empty((num_slots, *like.shape), dtype=like.dtype, pin_memory=True)
            self._targets = list(pinned.unbind())
            self._side = torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]
            self._ready = [new_event() for _ in range(num_slots)]
            self._copied = [new_event() for _ in range(num_slots)]
            self._prepare(block, pinned)
        self._free = deque(range(num_slots))
        self._in_flight: deque[tuple[int, Any, int | None]] = deque()

    def _prepare(self, block: Tensor, pinned: Tensor) -> None:
        """Makes the driver's own calls possible: events that exist, and pinned memory whose allocator knows the stream.

        torch gives pinned memory to others only once the streams that were seen to use it are done, so that one copy
        through torch is enough for all that follow.
        """
        walker = compiled_walker() if type(block) is Tensor else None
        if walker is None:
            return
        self._arrays = [target.numpy() for target in self._targets]  # their tolist() is five times as fast
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side), torch.no_grad():
            pinned.copy_(block, non_blocking=True)
            for event in (*self._ready, *self._copied):
                event.record(self._side)
        num_bytes = self.sources[0].numel() * self.sources[0].element_size()
        for source, target, ready, copied in zip(self.sources, self._targets, self._ready, self._copied, strict=True):
            handles = (self._side.cuda_stream, ready.cuda_event, copied.cuda_event)
            self._handles.append((target.data_ptr(), source.data_ptr(), num_bytes, *handles))
        self.addresses = [source.data_ptr() for source in self.sources]
        self._walker = walker

    @property
    def num_in_flight(self) -> int:
        """Copies that were sent and not taken yet."""
        return len(self._in_flight)

    @property
    def next_slot(self) -> int | None:
        """A free slot: write to `sources[slot]` on the current stream, then `send(slot, ...)`. Else None."""
        return self._free[0] if self._free else None

    def send(self, slot: int, note: Any, num_rows: int | None = None) -> None:
        """Start the copy of what the current stream has written to `sources[slot]`; `note` comes back with it.

        `num_rows`: how many of its rows are wanted; None means all.
        """
        self._free.remove(slot)
        if self._walker is not None and torch.cuda.current_device() == self._device.index:
            self._walker.copy_out(self._stream(), *self._handles[slot])
        elif self._on_gpu:
            self._ready[slot].record(torch.cuda.current_stream(self._device))
            self._side.wait_event(self._ready[slot])
            with torch.cuda.stream(self._side):
                self._targets[slot].copy_(self.sources[slot], non_blocking=True)
            self._copied[slot].record(self._side)
        self._in_flight.append((slot, note, num_rows))

    def take_arrived(self) -> list[tuple[Any, Any]]:
        """(note, numbers as nested lists) of the copies that have arrived, oldest first. Never waits.

        During a graph capture nothing has arrived: asking an event would break the capture.
        """
        arrived: list[tuple[Any, Any]] = []
        while self._in_flight and self._has_come(self._in_flight[0][0]):
            arrived.append(self._take())
        return arrived

    def wait_oldest(self) -> tuple[Any, Any]:
        """The oldest copy in flight; waits until it is there."""
        if self._on_gpu:
            self._copied[self._in_flight[0][0]].synchronize()
        return self._take()

    def _has_come(self, slot: int) -> bool:
        if self._walker is not None:
            come: bool = self._walker.has_come(self._stream(), self._handles[slot][-1])
            return come
        if is_capturing(self._device):
            return False
        return not self._on_gpu or bool(self._copied[slot].query())  # type: ignore[no-untyped-call]

    def _take(self) -> tuple[Any, Any]:
        slot, note, num_rows = self._in_flight.popleft()
        values = (self._arrays or self._targets)[slot][:num_rows].tolist()
        self._free.append(slot)
        return note, values
