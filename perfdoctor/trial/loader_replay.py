"""The loop's batches during a trial: the same few, over and over; a block's counted steps go round in whole cycles.

Every fetch still happens, its batch thrown away, unless `fetching` is False: then the loader costs nothing. A loader
that ends is begun again, so that short epochs suffice.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

from perfdoctor.trial.loader_places import LoaderPlaces
from perfdoctor.watch.patches import Patches

NUM_BATCHES = 4


class LoaderReplay:
    """Stands between the loop and its loaders. `requested()` is called before each batch that is trained on."""

    def __init__(self, requested: Callable[[], None]) -> None:
        self.fetching = True
        self.running = True  # False: hand batches through
        self.num_fetches = 0
        self.num_taken = 0  # of these, from the loader itself
        self.streaming = False  # it gives what cannot be asked for again: an IterableDataset, a generator
        self.turn = 0  # which of the replayed batches was handed out last
        self.asked: Callable[[], None] = lambda: None  # called whenever the loop asks for a batch to train on
        self.num_workers = 0
        self.queue = 0  # batches that workers hold ready
        self._requested = requested
        self._places = LoaderPlaces(NUM_BATCHES)
        self._successors: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._patches = Patches()

    def install(self) -> None:
        """Stand in front of torch's DataLoaders, those that run already included."""
        from torch.utils.data import DataLoader, dataloader

        single: Any = dataloader._BaseDataLoaderIter
        fetch, begin = single.__next__, DataLoader.__iter__

        def fetched(iterator: Any) -> Any:
            return fetch(iterator) if self._places.nested else self._next(iterator, fetch, begin)

        self._patches.replace(single, "__next__", fetched)
        self._places.install(self._patches)

    def remove(self) -> None:
        """Put the DataLoader classes back and forget the batches."""
        self.running = False
        self._patches.undo()
        self._places.clear()

    def next_of(self, iterator: Iterator[Any]) -> Any:
        """`next(iterator)` for a loader that the loop iterates through the session.

        Raises:
            StopIteration: as the iterator does.
        """
        self.streaming |= _is_stream(iterator)
        return self._replayed(iterator, lambda: next(iterator))

    def _next(self, iterator: Any, fetch: Callable[[Any], Any], begin: Callable[[Any], Any]) -> Any:
        self.queue = max(self.queue, _queue_of(iterator))
        self.streaming |= _is_stream(iterator)
        self.num_workers = max(self.num_workers, int(getattr(iterator, "_num_workers", 0) or 0))

        def one() -> Any:
            current = self._successors.get(iterator, iterator)
            try:
                return fetch(current)
            except StopIteration:
                loader = self._places.loader_of(iterator)
                if loader is None or not self.running or not _trains():
                    raise
                self._successors[iterator] = current = begin(loader)
                return fetch(current)

        return self._replayed(iterator, one)

    def _replayed(self, iterator: Any, fetch: Callable[[], Any]) -> Any:
        if self._places.nested or not self.running or not _trains():
            return fetch()
        self.asked()
        self._requested()
        if not self.running:  # that was the last step
            return fetch()
        self.num_fetches += 1
        batches = self._places.asked(iterator).batches
        batch = batches.take(self._fetched(fetch) if self.fetching or not batches.full else None)
        self.turn = batches.turn
        return batch

    def _fetched(self, fetch: Callable[[], Any]) -> Any:
        self._places.nested = True
        self.num_taken += 1
        try:
            return fetch()
        finally:
            self._places.nested = False


def _queue_of(iterator: Any) -> int:
    return int(getattr(iterator, "_num_workers", 0) or 0) * int(getattr(iterator, "_prefetch_factor", 0) or 0)


def _is_stream(iterator: Any) -> bool:
    from torch.utils.data.dataloader import _DatasetKind

    kind = getattr(iterator, "_dataset_kind", None)  # of a DataLoader's; a generator has none
    return kind == _DatasetKind.Iterable or (kind is None and isinstance(iterator, Generator))


def _trains() -> bool:
    return bool(sys.modules["torch"].is_grad_enabled())
