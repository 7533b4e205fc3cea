"""Which of a loop's loaders an iterator belongs to, also where each epoch makes a new DataLoader.

A loader is known again by itself; a new one by the place that begins to iterate it: it stands for the one that was
begun there before, once batches of that were asked for. (`zip` begins two at one place: neither was asked then.)
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from perfdoctor.treat.snapshot import RandomState
from perfdoctor.trial.kept_batches import ReplayedBatches
from perfdoctor.watch.fetch_cpu import FetchCpu
from perfdoctor.watch.patches import Patches


class LoaderPlace:
    """One loader of the loop's, or those that take its place one after another.

    `loader`: the newest, or, once `settled`, the one that is asked for all. None where it is not known.
    """

    def __init__(self, loader: Any, batches: ReplayedBatches, where: object = None) -> None:
        self.loader = loader
        self.batches = batches
        self.where = where
        self.begun = 0
        self.begun_at = self.epoch = 0  # steps before it was begun; from the beginning before to that one, 0: unknown
        self.made_anew = False  # another loader has taken its place
        self.asked = False  # for a batch, since it was begun
        self.anew = False  # asked for the first
        self.unused: Any = None  # the batch given last, until something is trained
        self.rebuilt: bool | None = None  # of the loader that was begun since then; None: none was
        self.fetch_ns = 0
        self.fetches = FetchCpu()
        self.source: Iterator[Any] | None = None

    def end(self) -> None:
        """Let go of the iterator behind it: the next batch begins another."""
        self.source = self.rebuilt = self.unused = None

    def renew(self) -> None:
        """`end` it where the loop has begun it anew. The workers of one that was made anew do not persist."""
        if self.rebuilt and getattr(self.loader, "_iterator", None) is not None:
            self.loader._iterator = None
        if self.rebuilt is not None:
            self.end()

    @property
    def has_left_unused(self) -> bool:
        """Whether the loop had begun it anew, when it asked, with a batch that it had not trained on."""
        return self.anew and self.unused is not None

    def fetched(self, otherwise: Callable[[], Any]) -> Any:
        """A batch from the loader as it now is, begun again where it ends; where it is not known, from `otherwise`."""
        if self.loader is None:
            return otherwise()
        if self.source is None:
            self.source = iter(self.loader)
        try:
            return next(self.source)
        except StopIteration:
            self.source = iter(self.loader)
            return next(self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderUse:
    """How a loop goes through its loader (None: it is not known, or there is none).

    `epoch`: steps from one beginning to the next, as seen: a loop may leave it by `break`; 0: unknown. `made_anew`:
    each time it is another loader, whose workers start anew.
    """

    loader: Any = None
    epoch: int = 0
    made_anew: bool = False


class LoaderPlaces:
    """All of them, in the order in which they were begun first.

    `settled`: what takes the place of a loader is begun by the loop, but it is the loader itself that is asked.
    `nested`: what is begun and asked now is so by us, or by a loader. `num_steps`: the loop has made.
    """

    def __init__(self, num_batches: int) -> None:
        self.places: list[LoaderPlace] = []
        self.settled = False
        self.nested = False
        self.num_steps = 0
        self._num_batches = num_batches
        self._counted = itertools.count(1)
        self._of_loader: weakref.WeakKeyDictionary[Any, LoaderPlace] = weakref.WeakKeyDictionary()
        self._of_iterator: weakref.WeakKeyDictionary[Any, LoaderPlace] = weakref.WeakKeyDictionary()
        self._loaders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._others: dict[int, tuple[Any, LoaderPlace]] = {}  # of iterators that no weak reference can name

    def install(self, patches: Patches) -> None:
        """From now on note each DataLoader that is begun."""
        from torch.utils.data import DataLoader

        begin = DataLoader.__iter__

        def begun(loader: Any) -> Any:
            if self.nested:
                return begin(loader)
            # It draws a seed; that of the iterator behind it is to be the only one.
            before = RandomState.take(filter(None, [loader.generator])) if self.settled else None
            iterator = begin(loader)
            if before is not None:
                before.restore()
            self._note(iterator, loader, _stack(sys._getframe(1)))
            return iterator

        patches.replace(DataLoader, "__iter__", begun)

    def clear(self) -> None:
        """Forget them, and their batches."""
        self.places.clear()
        self._of_loader.clear()
        self._of_iterator.clear()
        self._loaders.clear()
        self._others.clear()

    def loader_of(self, iterator: Any) -> Any:
        """The DataLoader that this very iterator comes from; None where it is not known."""
        return self._loaders.get(iterator)

    def asked(self, iterator: Any) -> LoaderPlace:
        """The place of an iterator that is asked for a batch; a new one where it was begun before `install`."""
        place = self._place_of(iterator)
        place.anew, place.asked = not place.asked, True
        return place

    def use(self) -> None:
        """Something is trained on the batches given."""
        for place in self.places:
            place.unused = None

    def _place_of(self, iterator: Any) -> LoaderPlace:
        if id(iterator) in self._others:
            return self._others[id(iterator)][1]
        try:
            place = self._of_iterator.get(iterator)
            if place is None:
                place = self._of_iterator[iterator] = self._new(None)
        except TypeError:
            place = self._new(None)
            self._others[id(iterator)] = iterator, place
        return place

    def _new(self, loader: Any, where: object = None) -> LoaderPlace:
        self.places.append(LoaderPlace(loader, ReplayedBatches(self._num_batches), where))
        return self.places[-1]

    def _note(self, iterator: Any, loader: Any, where: object) -> None:
        place = self._of_loader.get(loader) or self._predecessor(loader, where) or self._new(loader, where)
        if place.begun:
            place.epoch = self.num_steps - place.begun_at
            place.made_anew = place.made_anew or place.loader is not loader
        place.begun_at = self.num_steps
        if not self.settled:
            place.loader = loader
        place.begun, place.asked, place.rebuilt = next(self._counted), False, place.loader is not loader
        self._of_loader[loader] = self._of_iterator[iterator] = place
        self._loaders[iterator] = loader

    def _predecessor(self, loader: Any, where: object) -> LoaderPlace | None:
        found = [each for each in self.places if each.where == where and each.asked and _is_alike(each.loader, loader)]
        return min(found, key=lambda each: (each.loader.dataset is not loader.dataset, each.begun), default=None)


def _is_alike(one: Any, other: Any) -> bool:
    return type(one.dataset) is type(other.dataset) and one.batch_size == other.batch_size


def _stack(frame: Any) -> tuple[Any, ...]:
    """Where a call comes from: every function on the way and how far it has come; from a generator on, that one."""
    found: list[Any] = []
    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith("perfdoctor."):  # what we wrap comes and goes
            found += [frame.f_code, _spot(frame.f_code, frame.f_lasti)]
        if frame.f_code.co_flags & inspect.CO_GENERATOR:  # who asks it may be elsewhere each time
            return (*found, id(frame))
        frame = frame.f_back
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _spot(code: CodeType, offset: int) -> object:
    """Lines and columns: the offset itself is that of one of two instructions, as the interpreter has specialised."""
    return next(itertools.islice(code.co_positions(), offset // 2, None), None)
