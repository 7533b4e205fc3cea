"""The loop's batches during a trial: the same few, over and over; a block's counted steps go round in whole cycles.

Every fetch still happens, its batch thrown away, unless `fetching` is False: then the loader costs nothing. A loader
that ends is begun again, so that short epochs suffice.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator, Iterator, MutableMapping
from typing import Any

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
        self._caches: dict[int, list[Any]] = {}
        self._positions: dict[int, int] = {}
        self._successors: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._loaders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._nested = False
        self._patches = Patches()

    def install(self) -> None:
        """Stand in front of torch's DataLoaders, those that run already included."""
        from torch.utils.data import DataLoader, dataloader

        single: Any = dataloader._BaseDataLoaderIter
        fetch, begin = single.__next__, DataLoader.__iter__

        def fetched(iterator: Any) -> Any:
            return fetch(iterator) if self._nested else self._next(iterator, fetch, begin)

        self._patches.replace(single, "__next__", fetched)
        note_loaders(self._patches, self._loaders)

    def remove(self) -> None:
        """Put the DataLoader classes back and forget the batches."""
        self.running = False
        self._patches.undo()
        self._caches.clear()

    def next_of(self, iterator: Iterator[Any]) -> Any:
        """`next(iterator)` for a loader that the loop iterates through the session.

        Raises:
            StopIteration: as the iterator does.
        """
        self.streaming |= _is_stream(iterator)
        return self._replayed(id(iterator), lambda: next(iterator))

    def _next(self, iterator: Any, fetch: Callable[[Any], Any], begin: Callable[[Any], Any]) -> Any:
        self.queue = max(self.queue, _queue_of(iterator))
        self.streaming |= _is_stream(iterator)
        self.num_workers = max(self.num_workers, int(getattr(iterator, "_num_workers", 0) or 0))

        def one() -> Any:
            current = self._successors.get(iterator, iterator)
            try:
                return fetch(current)
            except StopIteration:
                loader = self._loaders.get(iterator)
                if loader is None or not self.running or not _trains():
                    raise
                self._successors[iterator] = current = begin(loader)
                return fetch(current)

        return self._replayed(id(iterator), one)

    def _replayed(self, key: int, fetch: Callable[[], Any]) -> Any:
        if self._nested or not self.running or not _trains():
            return fetch()
        self.asked()
        self._requested()
        if not self.running:  # that was the last step
            return fetch()
        self.num_fetches += 1
        cache = self._caches.setdefault(key, [])
        batch = self._fetched(fetch) if self.fetching or len(cache) < NUM_BATCHES else None
        if len(cache) < NUM_BATCHES:
            self.turn = len(cache)
            cache.append(batch)
            return fresh(batch)
        position = self._positions.get(key, 0)
        self._positions[key] = position + 1
        self.turn = position % len(cache)
        return fresh(cache[self.turn])

    def _fetched(self, fetch: Callable[[], Any]) -> Any:
        self._nested = True
        self.num_taken += 1
        try:
            return fetch()
        finally:
            self._nested = False


def fresh(batch: Any) -> Any:
    """The same tensors in containers of their own: a loop may pop from its batch."""
    kind = type(batch)
    if kind is dict:
        return {key: fresh(value) for key, value in batch.items()}
    return kind([fresh(each) for each in batch]) if kind in (list, tuple) else batch


def _queue_of(iterator: Any) -> int:
    return int(getattr(iterator, "_num_workers", 0) or 0) * int(getattr(iterator, "_prefetch_factor", 0) or 0)


def _is_stream(iterator: Any) -> bool:
    from torch.utils.data.dataloader import _DatasetKind

    kind = getattr(iterator, "_dataset_kind", None)  # of a DataLoader's; a generator has none
    return kind == _DatasetKind.Iterable or (kind is None and isinstance(iterator, Generator))


def _trains() -> bool:
    return bool(sys.modules["torch"].is_grad_enabled())


def note_loaders(patches: Patches, loaders: MutableMapping[Any, Any]) -> None:
    """From now on keep in `loaders` which DataLoader each new iterator comes from."""
    from torch.utils.data import DataLoader

    begin = DataLoader.__iter__

    def begun(loader: Any) -> Any:
        iterator = begin(loader)
        loaders[iterator] = loader
        return iterator

    patches.replace(DataLoader, "__iter__", begun)
