"""The batch of a graphed step: its tensors, its key, and the fixed inputs that a graph reads."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

from perfdoctor.errors import TreatmentRefused

Visit = Callable[[torch.Tensor, str], Any]
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)
_TENSORS = ("Tensor", "Parameter", "CudaTensor")


def map_tensors(value: Any, visit: Visit, path: str, key: list[Hashable]) -> Any:
    """`value` with each tensor replaced by `visit(tensor, path)`; what tells it from another batch goes to `key`.

    Tuples, named tuples, lists, mappings and dataclasses are walked, at any depth. A value that is none of these is
    part of the key itself: a graph holds it as it was at graph capture.

    Raises:
        TreatmentRefused: an object whose content cannot be seen, or a tensor of a kind that no graph can be fed with.
    """
    if isinstance(value, torch.Tensor):
        _check_kind(value, path)
        key.append((tuple(value.shape), value.stride(), value.dtype, value.requires_grad))
        return visit(value, path)
    if isinstance(value, _PLAIN):
        key.append((type(value), value))
        return value
    if isinstance(value, tuple | list):
        key.append((type(value), len(value)))
        items = [map_tensors(item, visit, f"{path}[{i}]", key) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        key.append((type(value), tuple(value)))
        return with_items(value, {k: map_tensors(item, visit, f"{path}[{k!r}]", key) for k, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        key.append((type(value), len(names)))
        return _replaced(value, {n: map_tensors(getattr(value, n), visit, f"{path}.{n}", key) for n in names})
    raise TreatmentRefused(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}: a graph cannot see what changes inside it. "
        "Pass its tensors as tuples, dicts or dataclasses; anything else as plain numbers or text."
    )


def plain_values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Numbers and texts in a batch, with their paths."""
    if isinstance(value, bool | int | float | str):
        yield path, value
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from plain_values(item, f"{path}[{index}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from plain_values(item, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from plain_values(getattr(value, field.name), f"{path}.{field.name}")


def batch_key(batch: tuple[Any, ...], device: torch.device) -> tuple[list[torch.Tensor], Hashable]:
    """The tensors of a batch in order, and what the graph for it is filed under.

    Raises:
        TreatmentRefused: as `map_tensors`; also a tensor on another device, or one that requires a gradient.
    """
    tensors: list[torch.Tensor] = []
    key: list[Hashable] = []

    def note(tensor: torch.Tensor, path: str) -> torch.Tensor:
        if tensor.device != device:
            raise TreatmentRefused(_wrong_device(path, tensor, device))
        if tensor.requires_grad:
            raise TreatmentRefused(f"{path} requires a gradient; a graphed step takes plain data: pass {path}.detach()")
        tensors.append(tensor)
        return tensor

    try:
        map_tensors(batch, note, "batch", key)
    except RecursionError:
        raise TreatmentRefused("the batch contains itself, or nests too deep for a graph to be fed with it") from None
    return tensors, tuple(key)


def _check_kind(tensor: torch.Tensor, path: str) -> None:
    if type(tensor).__name__ not in _TENSORS or tensor.layout is not torch.strided:
        raise TreatmentRefused(
            f"{path} is a {type(tensor).__name__} of layout {tensor.layout}: a graph is fed by copies between plain "
            "dense tensors. Make it dense before the step."
        )


def _wrong_device(path: str, tensor: torch.Tensor, device: torch.device) -> str:
    where = "host memory" if tensor.device.type == "cpu" else str(tensor.device)
    return (
        f"{path} is in {where}, the model on {device}: a graph reads the device memory it was captured with. "
        f"Move the batch first: perfdoctor.DevicePrefetcher(loader, {str(device)!r}), or "
        f"{path}.to({str(device)!r}, non_blocking=True)."
    )


def with_items(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the class of `value`, with these items."""
    if type(value) is dict:
        return items
    twin: Any = copy.copy(value)  # keeps what else the object holds (BatchEncoding: its encodings)
    for name, item in items.items():
        twin[name] = item
    return twin


def _replaced(value: Any, items: dict[str, Any]) -> Any:
    twin = copy.copy(value)
    for name, item in items.items():
        object.__setattr__(twin, name, item)
    return twin
