"""Nested batches: what in them is copied to the device, and the same batch again with the copies in its place.

A batch is taken apart once, when the loader hands it out, into a skeleton (its containers, with a `Place` where a
tensor was) and the list of those tensors. Containers without a tensor inside are passed on as they are; the others are
copied, so a loader that refills its own dict changes nothing in a batch that still waits.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type)


@dataclass(frozen=True, slots=True)
class Place:
    """Stands for the tensor number `index` of the batch."""

    index: int


@dataclass(frozen=True, slots=True)
class Moving:
    """Stands for something that only its own `.to(device)` can move: its class may keep more than tensors."""

    thing: Any


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A batch without its tensors."""

    tree: Any

    def filled(self, tensors: list[torch.Tensor], device: torch.device) -> Any:
        """The batch with `tensors[i]` at place i, and every other mover moved to `device`."""

        def fill(leaf: Any) -> Any:
            if type(leaf) is Place:
                return tensors[leaf.index]
            return _moved(leaf.thing, device) if type(leaf) is Moving else leaf

        return _mapped(self.tree, fill)


def take_apart(batch: Any, device: torch.device) -> tuple[Skeleton, list[torch.Tensor]]:
    """The skeleton of a batch and its host tensors, in the order of their places.

    Left in the skeleton: what is no tensor, and tensors on `device` already. Sparse, quantized and nested tensors,
    subclasses, tensors that require grad, those of another device and objects with a `.to` are moved by that method.
    """
    tensors: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if _is_on(leaf, device):
                return leaf
            if not _is_copied_bytewise(leaf):
                return Moving(leaf)
            tensors.append(leaf)
            return Place(len(tensors) - 1)
        return Moving(leaf) if callable(getattr(leaf, "to", None)) and not isinstance(leaf, type) else leaf

    return Skeleton(_mapped(batch, take)), tensors


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    here = tensor.device
    return here.type == device.type and here.index == device.index


def _is_copied_bytewise(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _moved(thing: Any, device: torch.device) -> Any:
    """`thing.to(device)`, without waiting for the copy where its `.to` can be told so."""
    if isinstance(thing, torch.Tensor):
        return thing.to(device, non_blocking=True)
    try:
        return thing.to(device, non_blocking=True)
    except TypeError:
        return thing.to(device)


def _mapped(node: Any, leaf: Callable[[Any], Any]) -> Any:
    """`node` with `leaf` applied to what is no container; the very `node` where nothing changed."""
    if isinstance(node, _ATOMS):
        return node
    if isinstance(node, torch.Tensor) or type(node) in (Place, Moving):
        return leaf(node)
    if isinstance(node, PackedSequence):
        return _packed(node, leaf)
    if isinstance(node, (dict, UserDict)):
        return _mapping(node, leaf)
    if isinstance(node, tuple):
        return _tuple(node, leaf)
    if isinstance(node, (list, deque)):
        return _list(node, leaf)
    if callable(getattr(node, "to", None)) and not isinstance(node, type):
        return leaf(node)
    if isinstance(node, Mapping):
        return _mapping(node, leaf)
    return _dataclass(node, leaf) if dataclasses.is_dataclass(node) else leaf(node)


def _packed(node: Any, leaf: Callable[[Any], Any]) -> Any:
    # batch_sizes belongs on the host. The checks of PackedSequence's constructor would not take a Place.
    pairs = zip(node._fields, node, strict=True)
    values = [value if name == "batch_sizes" else _mapped(value, leaf) for name, value in pairs]
    return type(node)._make(values)


def _tuple(node: tuple[Any, ...], leaf: Callable[[Any], Any]) -> Any:
    values = [_mapped(value, leaf) for value in node]
    if all(new is old for new, old in zip(values, node, strict=True)):
        return node
    make: Callable[[Any], Any] = getattr(type(node), "_make", type(node))
    return make(values)


def _list(node: Any, leaf: Callable[[Any], Any]) -> Any:
    changed = [(index, new) for index, old in enumerate(node) if (new := _mapped(old, leaf)) is not old]
    if not changed:
        return node
    twin = copy.copy(node)
    for index, new in changed:
        twin[index] = new
    return twin


def _mapping(node: Mapping[Any, Any], leaf: Callable[[Any], Any]) -> Any:
    changed = {key: new for key, old in node.items() if (new := _mapped(old, leaf)) is not old}
    if not changed:
        return node
    if not hasattr(node, "__setitem__"):
        read_only: Callable[[Any], Any] = type(node)
        return read_only({**node, **changed})
    twin: Any = copy.copy(node)  # keeps what the class keeps beside its items
    for key, new in changed.items():
        twin[key] = new
    return twin


def _dataclass(node: Any, leaf: Callable[[Any], Any]) -> Any:
    changed = {}
    for field in dataclasses.fields(node):
        old = getattr(node, field.name, None)
        if (new := _mapped(old, leaf)) is not old:
            changed[field.name] = new
    if not changed:
        return node
    # Neither `replace` nor the constructor: a batch is not validated or counted a second time, and init=False stays.
    twin = copy.copy(node)
    for name, new in changed.items():
        object.__setattr__(twin, name, new)
    return twin
