"""From what a caller passes to a list of gradients: each once, none sparse."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from perfdoctor.errors import UsageError
from perfdoctor.kernels import walker


def as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """A list as it is (not copied: that costs more than the launch), anything else as a list.

    Raises UsageError for what cannot be listed.
    """
    if type(parameters) is list:
        return parameters
    if isinstance(parameters, Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable):
        raise UsageError(
            f"expected parameters or gradients, got a {type(parameters).__name__}: pass list(model.parameters())"
        )
    return list(parameters)


def collect(items: list[Tensor], always_grad: bool) -> list[Tensor]:
    """The gradients that are there: a parameter's only once, however often it or its memory is listed.

    Raises UsageError for a sparse gradient or an item that is no tensor.
    """
    gradients: list[Tensor] = []
    seen: set[int] = set()
    given: list[int] = []
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
        if type(gradient) is Tensor and _is_freed(gradient):
            raise UsageError(
                f"gradient {index} (shape {tuple(gradient.shape)}) has no memory: its storage was resized to nothing "
                "(as sharding wrappers do between steps); read it while it is there"
            )
        if of_parameter:
            seen.add(id(gradient))
        else:
            given.append(len(gradients))
        gradients.append(gradient)
    return gradients if _are_apart(gradients) else without_repeats(gradients, frozenset(given))


def _is_freed(gradient: Tensor) -> bool:
    """Whether the gradient's memory is gone: torch itself reads it all the same where it is a view. 0.2 us each."""
    if torch.compiler.is_compiling() or gradient.device.type not in ("cuda", "cpu") or gradient._is_zerotensor():
        return False
    try:
        return walker.is_freed(gradient)
    except RuntimeError:  # a tensor without memory of its own
        return False


def _are_apart(gradients: list[Tensor]) -> bool:
    """Whether no two begin at the same address; False where that cannot be told. 0.15 us each."""
    if torch.compiler.is_compiling():
        return True
    try:
        return len({gradient.data_ptr() for gradient in gradients}) == len(gradients)
    except RuntimeError:  # a wrapper without memory of its own
        return False


def place_of(gradient: Tensor) -> object:
    """The same for two tensors over the same elements in memory, as in the kernels' table; else the tensor's own."""
    wrapped = torch.compiler.is_compiling() or type(gradient) not in (Tensor, torch.nn.Parameter)
    if wrapped or gradient.numel() == 0 or torch._C._functorch.is_functorch_wrapped_tensor(gradient):
        return id(gradient)
    address = gradient.data_ptr()
    strides = None if walker.is_dense(gradient) else (gradient.shape, gradient.stride())
    return (address, gradient.numel(), gradient.dtype, gradient.device, strides) if address else id(gradient)


def without_repeats(gradients: list[Tensor], given: frozenset[int] = frozenset()) -> list[Tensor]:
    """Each piece of memory once, but for the gradients at the places `given`: those count as often as they stand."""
    unique: dict[object, Tensor] = {}
    for number, gradient in enumerate(gradients):
        unique.setdefault(("given", number) if number in given else place_of(gradient), gradient)
    return list(unique.values())


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
