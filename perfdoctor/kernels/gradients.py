"""From what a caller passes to a list of gradients: each once, none sparse."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from perfdoctor.errors import UsageError
from perfdoctor.kernels import walker


def as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """A list as it is (not copied: that costs more than the launch), anything else as a list."""
    if type(parameters) is list:
        return parameters
    if isinstance(parameters, Tensor):
        return [parameters]
    return list(parameters)


def collect(items: list[Tensor], always_grad: bool) -> list[Tensor]:
    """The gradients that are there: a parameter's only once, however often it is listed.

    Raises UsageError for a sparse gradient or an item that is no tensor.
    """
    gradients: list[Tensor] = []
    seen: set[int] = set()
    for index, item in enumerate(items):
        if not isinstance(item, Tensor):
            raise UsageError(f"item {index} is a {type(item).__name__}: expected parameters or gradients (tensors)")
        of_parameter = always_grad or walker.is_parameter(item)
        gradient = item.grad if of_parameter else item
        if gradient is None or (of_parameter and id(gradient) in seen):
            continue
        if gradient.layout != torch.strided:
            raise UsageError(
                f"gradient {index} (shape {tuple(gradient.shape)}) is sparse ({gradient.layout}), and only dense ones "
                "can be read: build the embedding with sparse=False, or pass gradient.coalesce().values()"
            )
        if of_parameter:
            seen.add(id(gradient))
        gradients.append(gradient)
    return gradients


def without_repeats(gradients: list[Tensor]) -> list[Tensor]:
    """Each piece of memory once, for writing in place."""
    seen: set[tuple[object, ...]] = set()
    unique = []
    for gradient in gradients:
        place = (gradient.data_ptr(), gradient.numel(), gradient.dtype, gradient.device) if gradient.numel() else None
        if place is None or place not in seen:
            unique.append(gradient)
        if place is not None:
            seen.add(place)
    return unique


def by_device(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Grouped by device, in the order of first mention."""
    groups: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(gradient.device, []).append(gradient)
    return list(groups.values())


def readable(gradient: Tensor) -> Tensor:
    """The same values, dense: the tensor itself, or a copy of a view with holes, overlaps or a pending minus."""
    gradient = gradient.detach()
    if gradient.is_neg() or not walker.is_dense(gradient):
        return gradient.resolve_neg().contiguous()
    return gradient
