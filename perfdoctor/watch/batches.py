"""Batches on their way into the loop: how long each took, and how many samples it holds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from perfdoctor.watch.patches import Patches
from perfdoctor.watch.pauses import Pause
from perfdoctor.watch.steps import StepDetector

_DEPTH = 4


class BatchWaits:
    """Times every batch. Consumes nothing itself: one `iter`, one `next` for each of the loop's."""

    def __init__(self, pauses: list[Pause], handed: Callable[[int, int], None]) -> None:
        self._pauses = pauses
        self._handed = handed  # (samples or -1, ns waited), for each batch that is trained on
        self._requested: Callable[[], None] = lambda: None
        self._patches = Patches()
        self._timing = False
        self.loader: Any = None  # the last DataLoader or DataLoader iterator seen
        self.prefetched = False  # batches that are trained on came through a DevicePrefetcher

    def on_request(self, requested: Callable[[], None]) -> None:
        """Call `requested` each time before the loop waits for a batch it trains on."""
        self._requested = requested

    def next_of(self, iterator: Iterator[Any]) -> Any:
        """`next(iterator)`, timed.

        Raises:
            StopIteration: as the iterator does.
        """
        if self._timing:  # a loader inside a loader: the outer wait is the loop's
            return next(iterator)
        self.prefetched = self.prefetched or is_prefetcher(iterator)
        return self._timed(lambda: next(iterator))

    def patch_loaders(self) -> None:
        """Time torch's DataLoaders wherever they are iterated: for a script that is not ours to change."""
        from torch.utils.data import dataloader

        single: Any = dataloader._BaseDataLoaderIter
        workers: Any = dataloader._MultiProcessingDataLoaderIter
        fetch, start = single.__next__, workers.__init__

        def fetched(iterator: Any) -> Any:
            if self._timing:
                return fetch(iterator)
            self.loader = iterator
            return self._timed(lambda: fetch(iterator))

        def started(iterator: Any, *args: Any, **kwargs: Any) -> None:
            begin = time.time_ns()
            start(iterator, *args, **kwargs)
            amount = int(getattr(iterator, "_num_workers", -1))
            self._pauses.append(Pause(begin, time.time_ns(), threading.get_native_id(), "worker-start", amount))

        self._patches.replace(single, "__next__", fetched)
        self._patches.replace(workers, "__init__", started)

    def remove(self) -> None:
        """Put the DataLoader classes back."""
        self._patches.undo()

    def _timed(self, fetch: Callable[[], Any]) -> Any:
        trained = _trains()
        if trained:
            self.prefetched = self.prefetched or _asked_ahead(sys._getframe(1))
            self._requested()
        self._timing = True
        start = time.time_ns()
        try:
            batch = fetch()
        finally:
            self._timing = False
        end = time.time_ns()
        samples = num_samples(batch)
        self._pauses.append(Pause(start, end, threading.get_native_id(), "data" if trained else "eval-data", samples))
        if trained:
            self._handed(samples, end - start)
        return batch


def num_samples(batch: Any) -> int:
    """The common first dimension of the tensors in a batch, -1 where there is none."""
    sizes = set(_first_sizes(batch, _DEPTH))
    return sizes.pop() if len(sizes) == 1 else -1


def _first_sizes(value: Any, depth: int) -> Iterable[int]:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return [int(shape[0])] if len(shape) else []
    if not depth:
        return []
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [size for item in value for size in _first_sizes(item, depth - 1)]


_PREFETCHER = "perfdoctor.treat.prefetch"
_REACH = 7  # frames from where a batch is timed to the prefetcher that asks, wrappers of the loader between them


def is_prefetcher(loader: Any) -> bool:
    """Whether this loader is a DevicePrefetcher, or a pass over one."""
    frame = getattr(loader, "gi_frame", None)
    return type(loader).__module__ == _PREFETCHER or (frame is not None and _asked_ahead(frame, 1))


def _asked_ahead(frame: FrameType | None, reach: int = _REACH) -> bool:
    """Whether a DevicePrefetcher is among these frames."""
    for _ in range(reach):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == _PREFETCHER:
            return True
        frame = frame.f_back
    return False


def _trains() -> bool:
    # Batches asked for under no_grad or inference_mode are those of an evaluation.
    torch = sys.modules.get("torch")
    return torch is None or bool(torch.is_grad_enabled())


@contextmanager
def detected(detector: StepDetector) -> Iterator[None]:
    """Steps of a script that is not ours to change, with the batches that it asks for: they tell its updates apart."""
    waits = BatchWaits([], lambda *_: None)
    waits.on_request(detector.requested)
    detector.install()
    try:
        waits.patch_loaders()
        yield
    finally:
        waits.remove()
        detector.remove()
