"""What `DeviceMetrics.update` takes: tensors of one element, numbers, torchmetrics objects."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from perfdoctor.errors import UsageError


def as_inputs(named: Mapping[str, Any]) -> dict[str, Any]:
    """The values by name, each a tensor of one element, a number or a torchmetrics object.

    Raises UsageError for anything else, or where there is none.
    """
    if not named:
        raise UsageError("update() got no metric: pass values by name, update(loss=loss)")
    return {_checked_name(name): _checked(name, value) for name, value in named.items()}


def merged(values: object, named: dict[str, Any]) -> dict[str, Any]:
    """Values from a mapping and by name. Raises UsageError where the first is no mapping or has a name again."""
    if not isinstance(values, Mapping):
        raise UsageError(f"update() got a {type(values).__name__} without a name: pass update(loss=...), or a mapping")
    twice = sorted(set(values) & set(named))
    if twice:
        raise UsageError(f"update() got {', '.join(twice)} twice: in the mapping and by name")
    return {**values, **named}


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise UsageError(f"{name!r} is no name of a metric: expected a string that is not empty")
    return name


def _checked(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return _checked_tensor(name, value)
    if isinstance(value, (int, float)):  # NumPy's float64 is a float
        return float(value)
    if is_deferred(value):
        return value
    if hasattr(value, "__float__") and not isinstance(value, (str, bytes)):
        return float(value)  # NumPy's other scalars
    raise UsageError(
        f"{name} is a {type(value).__name__}: expected a tensor of one element, a number or a torchmetrics object"
    )


def _checked_tensor(name: str, value: Tensor) -> Tensor:
    if not value.is_nested and value.numel() != 1:
        raise UsageError(f"{name} has the shape {tuple(value.shape)}: expected one element, e.g. {name}.mean()")
    if value.is_complex():
        raise UsageError(f"{name} is complex ({value.dtype}): expected a real number, e.g. {name}.abs()")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else f"sparse ({value.layout})"
        raise UsageError(f"{name} is {kind}: expected a dense tensor, e.g. {name}.sum()")
    if value.is_quantized:
        raise UsageError(f"{name} is quantized ({value.dtype}): expected a plain number, e.g. {name}.dequantize()")
    if value.device.type == "meta":
        raise UsageError(f"{name} is on the meta device and has no value")
    return value


def as_weight(weight: Any) -> Any:
    """A weight: a number, or a tensor of one element. Raises UsageError for anything else."""
    if is_deferred(weight):
        raise UsageError("weight is a torchmetrics object: expected a number, such as the samples in the batch")
    checked = _checked("weight", weight)
    if isinstance(checked, Tensor) and checked.device.type == "cpu":
        checked = float(checked)
    if isinstance(checked, float) and not 0 <= checked < math.inf:
        raise UsageError(f"weight={checked}: expected a finite number that is not negative")
    return checked


def tensor_device(values: Sequence[Any]) -> torch.device:
    """The device where the values are added up: that of the first tensor that is not on the CPU."""
    for value in values:
        device = value.device if isinstance(value, Tensor) else getattr(value, "device", None)
        if isinstance(device, torch.device) and device.type != "cpu":
            return device
    return torch.device("cpu")


def is_deferred(value: object) -> bool:
    """Whether the value is a torchmetrics object (torchmetrics is not imported for the question)."""
    torchmetrics: Any = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, (torchmetrics.Metric, torchmetrics.MetricCollection))


def deferred_values(name: str, metric: Any, across_ranks: bool = False) -> dict[str, Any]:
    """What a torchmetrics object computes, by name: on this rank alone unless `across_ranks`.

    Nothing where it was never updated. A dictionary of results becomes `name/key`. Whatever its `compute` does on the
    host is the metric's own.
    """
    members = list(metric.values()) if isinstance(metric, torch.nn.ModuleDict) else [metric]
    if not all(member.update_called for member in members):
        return {}
    with torch.no_grad(), nullcontext() if across_ranks else _kept_apart(members):
        result = metric.compute()
    return as_inputs({f"{name}/{key}": value for key, value in result.items()} if isinstance(result, Mapping)
                     else {name: result})  # fmt: skip


@contextmanager
def _kept_apart(members: list[Any]) -> Iterator[None]:
    """No communication between ranks, and no result kept that lacks the other ranks' part."""
    before = [(member, member.distributed_available_fn, member._computed) for member in members]
    try:
        for member in members:
            member.distributed_available_fn = _never
            member._computed = None
        yield
    finally:
        for member, available, computed in before:
            member.distributed_available_fn, member._computed = available, computed


def _never() -> bool:
    return False
