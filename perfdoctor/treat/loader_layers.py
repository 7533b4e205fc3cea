"""A DataLoader changed in place, by several treatments at once, that may be taken back in any order.

What iterates a loader is looked up on its type, so the loader gets a type of its own, and that type holds a *layer* for
each treatment that is on: the settings it wants, and how it iterates over what lies beneath.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

_LAYERS = "_perfdoctor_layers"
_ITERATOR = "_iterator"  # where a loader keeps workers that persist
_ABSENT = object()


@dataclass(slots=True, eq=False, kw_only=True)
class Layer:
    """One treatment of a loader."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    iterate: Callable[[], Iterator[Any]] | None = None  # its batches, where they are others than those `beneath` it
    kept: Any = _ABSENT  # the loader's iterator from before this layer, whose workers may persist


@dataclass(slots=True, eq=False)
class _Layers:
    """All layers of one loader, the newest last, and its own settings."""

    kind: Any  # the loader's own type
    layers: list[Layer] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)
    was_iterated: bool = False  # as the loader itself would know it

    def iterate(self, loader: Any, num_layers: int) -> Iterator[Any]:
        """The batches through the oldest `num_layers` layers."""
        for layer in reversed(self.layers[:num_layers]):
            if layer.iterate is not None:
                return layer.iterate()
        begin: Callable[[Any], Iterator[Any]] = self.kind.__iter__
        return self._drawing_as_before(loader, begin) if self.own else begin(loader)

    def _drawing_as_before(self, loader: Any, begin: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """A new iterator draws a seed for its workers from torch's generator; one whose workers persist does not when
        it is used again. Where only the treated one does not, the draw is made here; where only it does, it draws from
        a generator of its own: shuffling and dropout go on as they would have."""
        now = vars(loader)
        before = {**now, **self.own}
        persisted = before["persistent_workers"] and before["num_workers"] > 0 and self.was_iterated
        persists = now["persistent_workers"] and now["num_workers"] > 0 and now.get(_ITERATOR) is not None
        self.was_iterated = True
        if persists and not persisted:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        if persists or not persisted:
            return begin(loader)
        generator = now["generator"]
        now["generator"] = torch.Generator()  # the sampler holds its own
        try:
            return begin(loader)
        finally:
            now["generator"] = generator

    def set(self, held: dict[str, Any]) -> None:
        """The loader's own settings with those of the layers over them."""
        # Past __setattr__, which forbids some after construction; the loader reads all of them at its next iter().
        for name, value in self.own.items():
            _put(held, name, value)
        for layer in self.layers:
            held.update(layer.settings)


@contextmanager
def layered(loader: Any, layer: Layer) -> Iterator[None]:
    """The loader with this layer on. Settings hold from its next `iter()` on; workers started here are ended here."""
    held = vars(loader)
    found = _layers_of(loader)
    layers = _Layers(type(loader)) if found is None else found
    treated = _treated(layers) if found is None else type(loader)
    for name in layer.settings:
        layers.own.setdefault(name, held.get(name, _ABSENT))
    if layer.settings:
        layer.kept = held.get(_ITERATOR, _ABSENT)
        layers.was_iterated |= layer.kept not in (None, _ABSENT)
    layers.layers.append(layer)
    try:
        loader.__class__ = treated
        if layer.settings:
            held[_ITERATOR] = None
            layers.set(held)
        yield
    finally:
        _take_off(loader, layers, layer, treated)


def layer_names(loader: Any) -> tuple[str, ...]:
    """Of the layers that are on."""
    found = _layers_of(loader)
    return () if found is None else tuple(layer.name for layer in found.layers)


def beneath(loader: Any, layer: Layer) -> Iterator[Any]:
    """A loader's batches without this layer, while it is on."""
    found = _layers_of(loader)
    if found is None or layer not in found.layers:
        return iter(loader)
    return found.iterate(loader, found.layers.index(layer))


def num_batches(loader: Any) -> int:
    """The length that the loader's own type gives it."""
    found = _layers_of(loader)
    return int((type(loader) if found is None else found.kind).__len__(loader))


def _layers_of(loader: Any) -> _Layers | None:
    found: _Layers | None = vars(type(loader)).get(_LAYERS)
    return found


def _treated(layers: _Layers) -> type:
    kind = layers.kind

    def iterate(self: Any) -> Iterator[Any]:
        return layers.iterate(self, len(layers.layers))

    return type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__, _LAYERS: layers})


def _take_off(loader: Any, layers: _Layers, layer: Layer, treated: type) -> None:
    held = vars(loader)
    later = layers.layers[layers.layers.index(layer) + 1 :]
    layers.layers.remove(layer)
    if not layers.layers and type(loader) is treated:
        loader.__class__ = layers.kind
    if not layer.settings:
        return
    layers.set(held)
    # The iterator that this layer's settings made: a later one keeps it, or the loader has it.
    keeper = next((each for each in later if each.settings), None)
    ours = held.get(_ITERATOR) if keeper is None else keeper.kept
    if keeper is None:
        _put(held, _ITERATOR, layer.kept)
    else:
        keeper.kept = layer.kept
    if ours not in (None, _ABSENT) and ours is not layer.kept:
        _end_workers(ours)


def _put(held: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        held.pop(name, None)
    else:
        held[name] = value


def _end_workers(iterator: Any) -> None:
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()
