"""Nested batches: what in them is copied to the device, and the same batch again with the copies in its place.

A batch is taken apart once, when the loader hands it out, into a skeleton (its containers, with a `Place` where a
tensor was) and the list of those tensors. Containers without a tensor inside are passed on as they are; the others are
copied, so a loader that refills its own dict changes nothing in a batch that still waits.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from perfdoctor.errors import UsageError

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_UNWATCHED = (dict.__setitem__, OrderedDict.__setitem__, UserDict.__setitem__, list.__setitem__, deque.__setitem__)
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
class Rebuilt:
    """Stands for a container whose class watches what is put in: it gets its tensors when they are there."""

    whole: Any  # a copy
    changed: list[tuple[Any, Any]]  # key, what stands for its value


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


def mapped_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value`, nested as batches are, with `change` applied to its tensors; a container that holds one is copied."""

    def changed(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return _mapped(_mapped(value, changed), lambda leaf: leaf)  # the second time for containers that watch


def take_apart(batch: Any, device: torch.device) -> tuple[Skeleton, list[torch.Tensor]]:
    """The skeleton of a batch and its host tensors, in the order of their places.

    Left in the skeleton: what is no tensor, and tensors on `device` already. Sparse, quantized and nested tensors,
    subclasses, tensors that require grad, those of another device and objects with a `.to` are moved by that method.

    Raises UsageError for a batch that contains itself, or a container that cannot be copied.
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

    try:
        return Skeleton(_mapped(batch, take)), tensors
    except RecursionError:
        raise UsageError(f"a batch ({type(batch).__name__}) contains itself, or nests too deep to be copied") from None


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
        pass
    try:
        return thing.to(device)
    except TypeError as error:
        raise UsageError(
            f"a batch holds a {type(thing).__module__}.{type(thing).__qualname__} whose .to(device) fails ({error}): "
            "let it take a device, give the method another name, or yield its tensors in a dict, list or tuple"
        ) from error


def _mapped(node: Any, leaf: Callable[[Any], Any]) -> Any:
    """`node` with `leaf` applied to what is no container; the very `node` where nothing changed."""
    if isinstance(node, _ATOMS):
        return node
    if isinstance(node, torch.Tensor) or type(node) in (Place, Moving):
        return leaf(node)
    if type(node) is Rebuilt:
        return _with_items(node.whole, [(key, _mapped(value, leaf)) for key, value in node.changed])
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
    if hasattr(type(node), "n_sequence_fields"):  # torch.return_types: tuples made in C, whose class takes one iterable
        made: Callable[[Any], Any] = type(node)
        return made(values)
    # The class's own constructor may take anything; a tuple's items are given to tuple itself.
    twin = tuple.__new__(type(node), values)
    if hasattr(node, "__dict__"):
        twin.__dict__.update(node.__dict__)
    return twin


def _list(node: Any, leaf: Callable[[Any], Any]) -> Any:
    return _replaced(node, _changed(enumerate(node), leaf))


def _mapping(node: Mapping[Any, Any], leaf: Callable[[Any], Any]) -> Any:
    return _replaced(node, _changed(node.items(), leaf))


def _changed(items: Iterable[tuple[Any, Any]], leaf: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    found = []
    for key, old in items:  # torch.compile cannot trace a comprehension with `:=`, and a model may answer in a dict
        new = _mapped(old, leaf)
        if new is not old:
            found.append((key, new))
    return found


def _replaced(node: Any, changed: list[tuple[Any, Any]]) -> Any:
    if not changed:
        return node
    stored = getattr(type(node), "__setitem__", None)
    if stored in _UNWATCHED:
        return _with_items(node, changed)
    if stored is not None:
        return Rebuilt(_copied(node), changed)
    read_only: Callable[[Any], Any] = type(node)
    return read_only({**node, **dict(changed)})


def _with_items(node: Any, changed: list[tuple[Any, Any]]) -> Any:
    twin = _copied(node)  # keeps what the class keeps beside its items
    for key, new in changed:
        twin[key] = new
    return twin


def _copied(node: Any) -> Any:
    if type(node) in (dict, list):
        return node.copy()  # which torch.compile can trace, as it cannot `copy.copy` of them
    try:
        twin = copy.copy(node)
    except Exception as error:
        raise UsageError(
            f"a batch holds a {type(node).__module__}.{type(node).__qualname__} that cannot be copied "
            f"({type(error).__name__}: {error}): give it a method to(device), or yield a plain dict, list or tuple"
        ) from error
    if getattr(node, "__dict__", None) is node:  # items that are attributes too (self.__dict__ = self)
        twin.__dict__ = twin
    return twin


def _copied_slots(node: Any) -> Any:
    """A copy of a frozen dataclass. With `__slots__` written by hand `copy` would set them, which it forbids."""
    slots = slot_names(type(node))
    if not slots or hasattr(type(node), "__setstate__") or hasattr(type(node), "__copy__"):
        return _copied(node)
    twin = object.__new__(type(node))
    twin.__dict__.update(node.__dict__) if hasattr(node, "__dict__") else None
    for name in slots:
        if name not in ("__dict__", "__weakref__") and hasattr(node, name):
            object.__setattr__(twin, name, getattr(node, name))
    return twin


def slot_names(kind: type) -> list[str]:
    """The `__slots__` of a class and of those it is made from."""
    slots = (vars(each).get("__slots__", ()) for each in kind.__mro__)
    return [name for each in slots for name in ((each,) if isinstance(each, str) else each)]


def _dataclass(node: Any, leaf: Callable[[Any], Any]) -> Any:
    changed = {}
    for field in dataclasses.fields(node):
        old = getattr(node, field.name, None)
        if (new := _mapped(old, leaf)) is not old:
            changed[field.name] = new
    if not changed:
        return node
    # Neither `replace` nor the constructor: a batch is not validated or counted a second time, and init=False stays.
    twin = _copied_slots(node) if type(node).__dataclass_params__.frozen else _copied(node)
    for name, new in changed.items():
        object.__setattr__(twin, name, new)
    return twin
