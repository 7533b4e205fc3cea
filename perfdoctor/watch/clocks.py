"""Stamps at the ends of steps: host time, and on a GPU an event that is read only after the loop."""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfdoctor.watch.device_events import new_event


class Stamp(NamedTuple):
    """A moment. `event` marks it on the device's timeline; None without a GPU."""

    ns: int
    event: Any


def cuda_active() -> bool:
    """Whether this process uses CUDA already. Never initialises it: the script may still choose its devices."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.version.cuda or torch.version.hip) and bool(torch.cuda.is_initialized())


def device_is_there() -> bool:
    """Whether there is a CUDA device, used or not. Asks the driver's library, and makes no context."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.device_count() > 0


def num_allocations(kind: str = "allocated") -> int:
    """Blocks that torch has allocated on the CUDA devices so far; `kind` "current": those in use now.

    0.1 ms a device, no sync. 1 where an allocator that is not torch's cannot tell.
    """
    torch: Any = sys.modules["torch"]
    try:
        if torch.cuda.get_allocator_backend() != "native":  # cudaMallocAsync leaves these at 0
            return 1
        stats = [torch.cuda.memory_stats(i) for i in range(torch.cuda.device_count())]
    except Exception:
        return 1
    return sum(each.get(f"allocation.all.{kind}", 0) for each in stats)


def capturing() -> bool:
    """Whether the current stream is in a CUDA graph capture. torch is loaded."""
    torch: Any = sys.modules["torch"]
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def stamp_now() -> Stamp:
    """Now. On a GPU about 5 us of host time: an event is recorded, nothing waits for it."""
    if not cuda_active():
        return Stamp(time.time_ns(), None)
    event = new_event(timed=True)
    event.record()
    return Stamp(time.time_ns(), event)


def elapsed_ns(start: Stamp, end: Stamp) -> int:
    """Device time between two stamps where both have events, else host time. Waits for the later event."""
    if start.event is None or end.event is None:
        return end.ns - start.ns
    end.event.synchronize()
    return int(start.event.elapsed_time(end.event) * 1e6)


def durations(pairs: list[tuple[Stamp, Stamp]]) -> NDArray[np.int64]:
    """`elapsed_ns` of each pair. Shape (n,)."""
    return np.array([elapsed_ns(start, end) for start, end in pairs], np.int64)
