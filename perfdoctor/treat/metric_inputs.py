"""What `DeviceMetrics.update` takes: tensors of one element, numbers, torchmetrics objects."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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
        return _checked_tensor(name, own_value(name, value))
    if is_deferred(value):
        return value
    return number_of(name, value, "a tensor of one element, a number or a torchmetrics object")


def number_of(name: str, value: Any, expected: str) -> float:
    """A number of Python's or NumPy's (its arrays of one element too), a Fraction, a Decimal as a float.

    Raises UsageError for anything else, or a number that no float holds.
    """
    if not hasattr(value, "__float__") or isinstance(value, (str, bytes)):
        raise UsageError(f"{name} is a {type(value).__name__}: expected {expected}")
    shape = getattr(value, "shape", ())
    if math.prod(shape) != 1:
        raise UsageError(f"{name} is a {type(value).__name__} of shape {tuple(shape)}: expected {expected}")
    if getattr(getattr(value, "dtype", None), "kind", "") == "c":  # NumPy would drop the imaginary part with a warning
        raise UsageError(f"{name} is complex ({value.dtype}): expected a real number, e.g. abs({name})")
    try:
        return float(value.item() if shape else value)
    except OverflowError:
        raise UsageError(f"{name} is too large for a float (over 1.8e308): expected {expected}") from None
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name} is a {type(value).__name__} that is no number ({error}): expected {expected}"
        ) from None


def own_value(name: str, value: Tensor) -> Tensor:
    """The tensor itself where torch.func.grad has wrapped it. Raises UsageError inside torch.func.vmap."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(value):
        if functorch.is_batchedtensor(value):
            raise UsageError(f"{name} is one value of many inside torch.vmap: use what vmap returns, e.g. its mean")
        value = functorch.get_unwrapped(value)
    return value


def outside_transforms() -> AbstractContextManager[Any]:
    """Inside, what is made is no wrapper of a torch.func transform that runs at this moment: it has memory."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


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
        checked = float(checked.detach())
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

    Nothing where it was never updated; over all ranks it takes part even so, as the others wait for it. A dictionary of
    results becomes `name/key`. Whatever its `compute` does on the host is the metric's own.
    """
    if not (across_ranks or part_of(metric).has_values):
        return {}
    with torch.no_grad(), _all_together(_members(metric)) if across_ranks else _kept_apart(_members(metric)):
        result = metric.compute()
    return as_inputs({f"{name}/{key}": value for key, value in result.items()} if isinstance(result, Mapping)
                     else {name: result})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPart:
    """What one rank has of a torchmetrics object."""

    has_values: bool
    """each member of a collection has"""
    keeps_lists: bool
    """of all values: torchmetrics gathers them by their number of dimensions, which an empty list does not know"""


def part_of(metric: Any) -> MetricPart:
    """This rank's part."""
    members = _members(metric)
    return MetricPart(
        has_values=all(member.update_called for member in members),
        keeps_lists=any(isinstance(value, list) for member in members for value in member._defaults.values()),
    )


def computed_together(ranks: Sequence[Mapping[str, MetricPart]]) -> list[str]:
    """The names of the torchmetrics objects that all ranks can compute together, in the order to do so.

    Raises UsageError, alike on every rank, where one lacks an object or the values that the others would wait for.
    """
    names = sorted(set().union(*ranks))
    for name in names:
        lacking = [str(rank) for rank, parts in enumerate(ranks) if name not in parts]
        what = "never passed to update(), and its compute() waits for every rank: pass it on each"
        if not lacking and any(parts[name].keeps_lists and parts[name].has_values for parts in ranks):
            lacking = [str(rank) for rank, parts in enumerate(ranks) if not parts[name].has_values]
            what = "has no values of, and the lists in it cannot be gathered with an empty one: give every rank some"
        if lacking:
            raise UsageError(
                f"{name} is a torchmetrics object that rank {', '.join(lacking)} of {len(ranks)} {what}, or use "
                "read(across_ranks=False)"
            )
    return [name for name in names if any(parts[name].has_values for parts in ranks)]


def _members(metric: Any) -> list[Any]:
    return list(metric.values()) if isinstance(metric, torch.nn.ModuleDict) else [metric]


@contextmanager
def _all_together(members: list[Any]) -> Iterator[None]:
    """A result kept from before would keep this rank out of the exchange that the others wait in.

    No word about a `compute` before the first `update`: this rank had nothing to add.
    """
    for member in members:
        member._computed = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*compute.* method of metric .* was called before the ``update``")
        yield


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
