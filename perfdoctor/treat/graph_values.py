"""Values that Python state may hold: what they held, whether that is still so, and how to say it in a few words."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from perfdoctor.treat.iterator_position import Position
from perfdoctor.units import format_plural

_MOST_NUMBERS = 1_000_000  # of an array that is compared
SCALARS = (type(None), bool, int, float, complex, str, bytes)
missing = object()
"""stands where a name holds nothing"""


def same(before: Any, now: Any) -> bool:
    """Whether two values, or two contents, are the same."""
    if isinstance(before, Content | ArrayContent):
        return bool(before == now)
    if isinstance(before, SCALARS):
        # NaN is what it was.
        return type(before) is type(now) and bool(before == now or before != before)
    return before is now


def _same_key(one: Any, other: Any) -> bool:
    """Keys of a dict. A tensor's hash is its identity: two of them are never compared, which would wait, or raise."""
    return one is other or (hash(one) == hash(other) and bool(one == other))


class Content:
    """What a container held."""

    def __init__(self, items: Any) -> None:
        self.kind = type(items)
        self.items: list[Any] = list(items.items()) if isinstance(items, dict) else list(items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Content) or self.kind is not other.kind or len(self.items) != len(other.items):
            return False
        if issubclass(self.kind, dict):
            return all(_same_key(a[0], b[0]) and same(a[1], b[1]) for a, b in zip(self.items, other.items, strict=True))
        return all(same(a, b) for a, b in zip(self.items, other.items, strict=True))

    __hash__ = None  # type: ignore[assignment]


class ArrayContent:
    """What a numpy array held."""

    def __init__(self, array: Any) -> None:
        self.values = array.copy()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ArrayContent) or self.values.shape != other.values.shape:
            return False
        return bool(self.values.tobytes() == other.values.tobytes())

    __hash__ = None  # type: ignore[assignment]


def is_array(value: Any) -> bool:
    """Whether it is a numpy array of numbers, small enough to be compared."""
    kind = type(value)
    if (kind.__module__, kind.__name__) != ("numpy", "ndarray"):
        return False
    return value.dtype.kind in "biufc" and 0 < value.size <= _MOST_NUMBERS and bool(value.flags.writeable)


def content(value: Any) -> Content | ArrayContent:
    """What a container or an array holds at this moment."""
    return ArrayContent(value) if is_array(value) else Content(value)


def refill(items: Any, before: Any) -> None:
    """Put a content back into the container that it was of."""
    if isinstance(before, ArrayContent):
        items[...] = before.values
        return
    held = before.items if isinstance(before, Content) else list(before)
    items.clear()
    items.update(held) if isinstance(items, dict | set) else items.extend(held)


def described(value: Any) -> str:
    """A value of Python's in a few words, for a message."""
    if value is missing:
        return "nothing"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Position):
        return "a position"
    if isinstance(value, Content):
        return format_plural(len(value.items), "item")
    if isinstance(value, ArrayContent):
        return f"an array of shape {value.values.shape}"
    if isinstance(value, Mapping | list | set | deque):
        return format_plural(len(value), "item")
    text = repr(value) if isinstance(value, SCALARS) else f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:37] + "..."


def described_change(before: Any, after: Any) -> str:
    """What a value was and is; of two containers of one length the first item that differs."""
    if isinstance(before, Content) and isinstance(after, Content) and len(before.items) == len(after.items):
        is_dict = issubclass(before.kind, dict)
        for index, (old, new) in enumerate(zip(before.items, after.items, strict=True)):
            key, one, other = (old[0], old[1], new[1]) if is_dict and _same_key(old[0], new[0]) else (index, old, new)
            if not same(one, other):
                return f"[{key!r}] {described(one)} -> {described(other)}"
    return f"{described(before)} -> {described(after)}"
