"""Which implementation reads the gradients of one device: Triton, the CUDA twin, or torch."""

from __future__ import annotations

import functools
import math
from types import ModuleType

import torch
from torch import Tensor

from perfdoctor.errors import UsageError
from perfdoctor.kernels import kernel_launch, pointer_table, reference, walker
from perfdoctor.kernels.gradients import readable
from perfdoctor.kernels.pointer_table import ABS_MAX, L2, GradTable, TableCache

TABLES = TableCache()
_KERNEL_NORMS = {2.0: L2, math.inf: ABS_MAX}
KERNELS = ("triton", "cuda", "torch")


def kernel_norm_of(norm_type: float) -> int | None:
    """What the kernels compute for this order: L2 or the largest magnitude; None for orders that torch computes."""
    return _KERNEL_NORMS.get(norm_type)


def uses_table(device: torch.device, kernel: str | None) -> bool:
    """Whether gradients there are read through a pointer table. Raises UsageError where the kernel cannot run."""
    if kernel == "torch":
        return False
    if device.type == "cuda":
        return kernel is not None or kernel_launch.has_triton()
    if device.type != "cpu" or kernel is None:
        return False
    if kernel == "triton":
        from perfdoctor.kernels import triton_launch

        if triton_launch.is_interpreting():
            return True
    raise UsageError(f"kernel={kernel!r} cannot read {device.type} tensors: pass kernel=None or 'torch'")


@functools.cache
def launcher(kernel: str | None) -> ModuleType:
    """The module that launches: `norm`, `scale`, `stats`."""
    if kernel == "cuda":
        from perfdoctor.kernels import cuda_twin

        return cuda_twin
    from perfdoctor.kernels import triton_launch

    return triton_launch


def table_of(items: list[Tensor], always_grad: bool, kernel: str | None) -> GradTable | None:
    """The verified table of a list whose gradients all lie on one device, each readable in place; else None."""
    if kernel == "torch":
        return None
    recent = TABLES.find_recent(items, always_grad)
    if recent is not None and uses_table(recent.device, kernel):  # what made it may have been another kernel
        return recent
    device = table_device(items, always_grad, kernel)
    rows = walker.gather_rows(items, always_grad) if device is not None else None
    if device is None or rows is None or pointer_table.device_of(rows) != device:
        return None
    return TABLES.find(items, always_grad, rows, device)


def table_device(items: list[Tensor], always_grad: bool, kernel: str | None) -> torch.device | None:
    """The device of the first gradient, if a kernel may read gradients there through a table."""
    first = _first_gradient(items, always_grad)
    if first is None or not _is_plain(first) or not uses_table(first.device, kernel):
        return None
    return first.device


def _first_gradient(items: list[Tensor], always_grad: bool) -> Tensor | None:
    for item in items:
        gradient = walker.gradient_of(item, always_grad) if isinstance(item, Tensor) else None
        if gradient is not None:
            return gradient
    return None


def _is_plain(gradient: Tensor) -> bool:
    """No subclass (a wrapper that merely says it is on a GPU, say), and of a type that the kernels read."""
    return type(gradient) in (Tensor, torch.nn.Parameter) and gradient.dtype in walker.ELEMENT_CODES


def device_table(gradients: list[Tensor], kernel: str | None) -> GradTable | None:
    """The table of gradients of one device; None where torch must read them (their type, or no gradient at all)."""
    if not gradients or not uses_table(gradients[0].device, kernel):
        return None
    if not all(_is_plain(gradient) for gradient in gradients):
        return None
    rows = walker.gather_rows(gradients, False)
    return None if rows is None else TABLES.find([], False, rows, gradients[0].device)


def norm_on_device(gradients: list[Tensor], norm_type: float, kernel: str | None) -> Tensor:
    """The norm of gradients of one device, there; float32 [], or float64 [] for float64 ones."""
    what = kernel_norm_of(norm_type)
    if what is not None and gradients and uses_table(gradients[0].device, kernel):
        dense = [readable(gradient) for gradient in gradients]  # holds the copies until the launch is queued
        table = device_table(dense, kernel)
        if table is not None and not table.is_empty:
            with table.lock:
                norm: Tensor = launcher(kernel).norm(table, what, 1.0)
            return norm
    with torch.no_grad():
        return reference.total_norm(gradients, norm_type)
