"""Streams and events of the emulated device. Work runs at once: they keep the order of copies to the host, and time."""

from __future__ import annotations

import time
from typing import Any

import torch

from perfdoctor.emulate import border
from perfdoctor.emulate.arrivals import arrive, tick

_DEVICE = torch.device("cuda", 0)


class Event:
    """`torch.cuda.Event`."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> None:
        self.enable_timing = enable_timing
        self.device = _DEVICE
        self.moment = 0
        self.cuda_event = 0
        self.event_id = id(self)
        self._recorded_ns: int | None = None

    def record(self, stream: Any = None) -> None:
        self.moment = tick()
        self._recorded_ns = time.perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        """The stream waits, not the host."""

    def query(self) -> bool:
        arrive(self.moment)
        return True

    def synchronize(self) -> None:
        border.cross("cuda_synchronize")
        arrive(self.moment)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of host time from this event to `end`.

        Raises:
            RuntimeError: an event was made without enable_timing=True, or never recorded.
        """
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded_ns is None or end._recorded_ns is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end._recorded_ns - self._recorded_ns) / 1e6


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = _DEVICE
        self.priority = priority
        self.stream_id = id(self)
        self.cuda_stream = self.stream_id
        self.device_index = 0
        self.device_type = 1
        self._before: list[Stream] = []

    def synchronize(self) -> None:
        border.cross("cuda_synchronize")
        arrive()

    def query(self) -> bool:
        arrive()
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """The stream waits, not the host."""

    def wait_stream(self, stream: Stream) -> None:
        """The stream waits, not the host."""

    def __enter__(self) -> Stream:
        self._before.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self._before.pop())

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class StreamContext:
    """`torch.cuda.StreamContext`, what `torch.cuda.stream(s)` returns; None is no change."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


DEFAULT = Stream()
_current = DEFAULT


def current_stream(device: Any = None) -> Stream:
    """The stream that work goes to."""
    return _current


def set_stream(stream: Stream | None) -> None:
    """Send work to `stream` from now on."""
    global _current
    if stream is not None:
        _current = stream
