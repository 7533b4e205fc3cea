"""What `NonFiniteWatch` is given: the model's names, the optimizers, gradients and a loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from perfdoctor.errors import UsageError
from perfdoctor.kernels.grad_stats import grad_stats
from perfdoctor.treat.compiled import module_of
from perfdoctor.treat.metric_inputs import number_of, own_value
from perfdoctor.treat.nonfinite_hits import NAMES


def names_of(model: nn.Module) -> dict[int, tuple[Tensor, str]]:
    """The model's parameters by identity, in order, a shared one under its first name.

    Raises UsageError for what is no model, or has none.
    """
    model = module_of(model)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    names: dict[int, tuple[Tensor, str]] = {
        id(parameter): (parameter, name) for name, parameter in model.named_parameters()
    }
    if not names:
        raise UsageError(f"{type(model).__name__} has no parameters, so there is no gradient to watch")
    return names


def optimizers_of(optimizers: Any) -> tuple[Optimizer, ...] | None:
    """One or several as a tuple; None stays. Raises UsageError for what is no optimizer."""
    if optimizers is None:
        return None
    if not isinstance(optimizers, (Optimizer, Iterable)):
        raise UsageError(f"optimizers: {type(optimizers).__name__} is none: pass one optimizer or several")
    several = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    for optimizer in several:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"optimizers: {type(optimizer).__name__} is no torch.optim.Optimizer")
    if not several:
        raise UsageError("optimizers: none in it, so that nothing would be watched: None watches the model's")
    return several


def counts_of(pairs: list[tuple[str, Tensor]], kernel: str | None) -> tuple[NAMES, Tensor]:
    """Names of the gradients that are there, and how many non-finite values each has, int64 [n] on the device."""
    try:
        stats = grad_stats(pairs, kernel=kernel)
    except UsageError:
        if not any(p.grad is not None and (p.grad.is_sparse or p.grad.is_complex()) for _, p in pairs):
            raise
        # A sparse gradient has its values in a dense tensor; coalescing it would wait for the device.
        present = [(name, parameter.grad) for name, parameter in pairs if parameter.grad is not None]
        dense = [(name, grad._values() if grad.is_sparse else grad) for name, grad in present]
        real = [(name, torch.view_as_real(grad) if grad.is_complex() else grad) for name, grad in dense]
        stats = grad_stats(real, kernel=kernel)
    return stats.names, stats.per_tensor.num_nonfinite


def loss_of(loss: Any) -> Tensor | float | None:
    """A tensor of one element that is not finite where one of the loss is not; a float from the host as it is.

    Raises UsageError for what is neither a tensor nor a number.
    """
    if loss is None or isinstance(loss, int):  # a whole number is finite, however large
        return None
    if not isinstance(loss, Tensor):
        return number_of("loss", loss, "a tensor or a number")
    loss = own_value("loss", loss)
    if loss.layout is not torch.strided or loss.is_nested or loss.device.type == "meta":
        kind = "nested" if loss.is_nested else loss.layout if loss.layout is not torch.strided else "on the meta device"
        raise UsageError(f"loss is {kind}: expected a dense tensor with a value, e.g. loss.sum()")
    loss = loss.detach()
    if loss.is_complex():
        loss = torch.view_as_real(loss)
    if loss.is_floating_point() and loss.element_size() == 1:  # torch.isfinite takes no float8
        loss = loss.to(torch.float32)
    if loss.numel() != 1:
        finite = torch.isfinite(loss).all()
        loss = torch.where(finite, 0.0, torch.full((), math.nan, device=loss.device))
    return float(loss) if loss.device.type == "cpu" else loss


def value_at(device: torch.device, value: Tensor | float) -> Tensor | None:
    """The value on the device; None for a finite number, which needs no look there."""
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    return None if math.isfinite(value) else torch.full((), value, dtype=torch.float32, device=device)
