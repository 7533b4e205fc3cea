"""Norms and statistics of all gradients from one read: `grad_norm`, `clip_grad_norm_`, `grad_stats`.

    L2 = sqrt(sum x^2)    clip: x *= min(1, max_norm / (L2 + 1e-6))

On a GPU one kernel reads every gradient, however many there are; nothing waits for the device. Pass a list that you
keep: `model.parameters()` walks all modules on every call, which takes longer than the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from perfdoctor.errors import UsageError
from perfdoctor.kernels import custom_ops, kernel_launch, launch_route, reference, sharded_norm, stats_table, walker
from perfdoctor.kernels.gradients import as_list, by_device, collect, place_of, readable, without_repeats
from perfdoctor.kernels.pointer_table import GradTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Columns of statistics on the device: [num_tensors] each, or [] for the total."""

    sum: Tensor
    """float32"""
    mean: Tensor
    """float32; NaN where there is no element"""
    l2: Tensor
    """float32"""
    abs_max: Tensor
    """float32; NaN where a NaN is"""
    num_nonfinite: Tensor
    """int64: infinities and NaN"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradStats:
    """What `grad_stats` found; reading a number from it (`.item()`, printing) waits for the device."""

    names: tuple[str, ...]
    """of the parameters that have a gradient, in order"""
    per_tensor: Statistics
    total: Statistics
    """of all gradients together, a shared one once"""


def grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0, *, kernel: str | None = None) -> Tensor:
    """The norm of all gradients as one vector: (sum |x|^p)^(1/p).

    `parameters`: parameters, whose `.grad` is read (None is skipped; a parameter listed twice counts once), or
    gradients themselves: tensors of any shape, strides and real type, on any devices, DTensors too.
    `kernel`: "triton" (None means it on a GPU), "cuda" (compiled on first use) or "torch" (None means it elsewhere).
    Orders other than 2 and inf, and types other than float32, float16 and bfloat16, are left to torch.

    Returns a float32 scalar on the first gradient's device (float64 where a gradient is): torch returns the gradients'
    type, which rounds a bfloat16 norm to three digits. L2 is within 1e-6 of float64, and the same bits on every call.
    Works inside torch.compile(fullgraph=True), which has `kernel` chosen, and CUDA graphs; never waits for the device.
    The norm cannot be differentiated: for a gradient penalty use torch's.

    Raises UsageError for a sparse gradient, an item that is no tensor, or a kernel that cannot run there.
    """
    norm_type = float(norm_type)
    kernel_launch.check_kernel(kernel, launch_route.KERNELS)
    if torch.compiler.is_compiling():
        gradients, once = _compiled_gradients(as_list(parameters), False)
        compiled: Tensor = custom_ops.grad_norm(gradients, norm_type, once) if gradients else torch.tensor(0.0)
        return compiled
    items = as_list(parameters)
    what = launch_route.kernel_norm_of(norm_type)
    if what is not None:
        table = launch_route.table_of(items, False, kernel)
        if table is not None and not table.is_empty:
            with table.lock:
                norm: Tensor = launch_route.launcher(kernel).norm(table, what, 1.0)
            return norm
    return _norm_of(collect(items, False), norm_type, kernel)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    kernel: str | None = None,
) -> Tensor:
    """In the place of `torch.nn.utils.clip_grad_norm_`: scales the gradients in place so that their norm is at most
    `max_norm`, and returns the norm from before.

        grad *= min(1, max_norm / (norm + 1e-6))

    The product is rounded once, from float32. Infinite and NaN gradients end as torch's do: with an infinite norm
    finite ones become 0 and infinite ones NaN, with a NaN norm all become NaN. Where no clipping is needed the scaling
    launch returns at once and the host never knows. A parameter listed twice counts once and is scaled once.
    `error_if_nonfinite=True` reads the norm, the one wait for the device there is, and raises RuntimeError before any
    gradient changes; as with torch's, torch.compile(fullgraph=True) refuses it. `foreach` is taken and ignored.
    `kernel`, types, returned tensor and errors: see `grad_norm`.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    kernel_launch.check_kernel(kernel, launch_route.KERNELS)
    if torch.compiler.is_compiling():
        return _clip_compiled(as_list(parameters), max_norm, norm_type, error_if_nonfinite)
    items = as_list(parameters)
    what = launch_route.kernel_norm_of(norm_type)
    table = launch_route.table_of(items, True, kernel) if what is not None else None
    if table is None or what is None or table.is_empty:
        return _clip_elsewhere(items, max_norm, norm_type, error_if_nonfinite, kernel)
    launcher = launch_route.launcher(kernel)
    with table.lock:  # another thread's norm of the same gradients would leave its own coefficient in the table
        norm: Tensor = launcher.norm(table, what, max_norm)
        if error_if_nonfinite:
            _check_finite(norm, norm_type)
        launcher.scale(table)
    walker.bump_versions(items)
    return norm


def grad_stats(
    named_parameters: torch.nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    kernel: str | None = None,
) -> GradStats:
    """Sum, mean, L2, largest magnitude and number of non-finite values, per gradient and in total, from one read.

    `named_parameters`: a module, a mapping, or pairs such as `model.named_parameters()`; parameters without a gradient
    are left out, gradients themselves may stand in their place. A gradient under two names has a row for each and
    counts once in the total. DTensors give this rank's part. Results are tensors on the first gradient's device;
    nothing waits for the device. A list of pairs that is kept, `list(model.named_parameters())`, costs the host least:
    a module is walked in Python on every call. A complex gradient, whose sum is none of these, is refused. `kernel`,
    types and errors: see `grad_norm`.
    """
    kernel_launch.check_kernel(kernel, launch_route.KERNELS)
    pairs = _as_pairs(named_parameters)
    if torch.compiler.is_compiling():
        return _stats_elsewhere(pairs, kernel)
    found = stats_table.find(pairs, kernel)
    if found is None:
        return _stats_elsewhere(pairs, kernel)
    with found.table.lock:
        out, counts = launch_route.launcher(kernel).stats(found.table)
    if found.columns is not None:
        out, counts = stats_table.in_order(out, found.columns), stats_table.in_order(counts, found.columns)
    return _split(found.names, out, counts)


def _stats_elsewhere(pairs: stats_table.Pairs, kernel: str | None) -> GradStats:
    """Statistics where one table does not reach: several devices, odd layouts, DTensors, the CPU."""
    names, gradients = _named_gradients(pairs)
    unique = without_repeats(gradients)
    index = {place_of(gradient): number for number, gradient in enumerate(unique)}
    local = [sharded_norm.local_of(gradient) for gradient in unique]
    if torch.compiler.is_compiling():
        out, counts = custom_ops.grad_stats(local)
    else:
        out, counts = stats_of(local, kernel)
    columns = tuple(index[place_of(gradient)] for gradient in gradients)
    if len(unique) != len(gradients):
        out, counts = stats_table.in_order(out, columns), stats_table.in_order(counts, columns)
    return _split(tuple(names), out, counts)


def stats_of(gradients: list[Tensor], kernel: str | None = None) -> tuple[Tensor, Tensor]:
    """The table behind `grad_stats`: float32 [4, n + 1] (sum, mean, L2, abs-max; total last), int64 [n + 1] counts."""
    if len(by_device(gradients)) == 1:
        dense = [readable(gradient) for gradient in gradients]  # holds the copies until the launch is queued
        table = launch_route.device_table(dense, kernel)
        if table is not None and not table.is_empty:
            with table.lock:
                result: tuple[Tensor, Tensor] = launch_route.launcher(kernel).stats(table)
            return result
    return reference.stats(gradients)


def _split(names: tuple[str, ...], out: Tensor, counts: Tensor) -> GradStats:
    walk = None if torch.compiler.is_compiling() or out.device.type == "cpu" else walker.compiled_walker()
    if walk is not None:  # ten views of 2 us each are as long as the kernel
        columns = walk.split_columns(out, counts)
    else:
        last = len(names)
        columns = [*out[:, :last], counts[:last], *out[:, last], counts[last]]
    return GradStats(names=names, per_tensor=_statistics(columns[:5]), total=_statistics(columns[5:]))


def _statistics(columns: list[Tensor]) -> Statistics:
    return Statistics(sum=columns[0], mean=columns[1], l2=columns[2], abs_max=columns[3], num_nonfinite=columns[4])


def _as_pairs(named: object) -> stats_table.Pairs:
    """The pairs as a list; a list is taken as it is."""
    if isinstance(named, torch.nn.Module):
        named = named.named_parameters()
    if not isinstance(named, Iterable):
        raise UsageError(
            f"expected (name, parameter) pairs, got a {type(named).__name__}: pass model.named_parameters()"
        )
    return named if type(named) is list else list(named.items() if isinstance(named, Mapping) else named)


def _named_gradients(pairs: stats_table.Pairs) -> tuple[list[str], list[Tensor]]:
    names: list[str] = []
    gradients: list[Tensor] = []
    for pair in pairs:
        if not stats_table.is_pair(pair):
            raise UsageError(f"expected (name, parameter) pairs, got {pair!r:.80}: pass model.named_parameters()")
        for gradient in collect([pair[1]], False):
            names.append(pair[0])
            gradients.append(gradient)
    return names, gradients


def _norm_of(gradients: list[Tensor], norm_type: float, kernel: str | None) -> Tensor:
    """The norm of gradients on several devices, of odd layouts, or sharded."""
    if not gradients:
        return torch.tensor(0.0)

    def local_norm(local: list[Tensor]) -> Tensor:
        return launch_route.norm_on_device(local, norm_type, kernel)

    sharded = [gradient for gradient in gradients if sharded_norm.is_dtensor(gradient)]
    plain = [gradient for gradient in gradients if not sharded_norm.is_dtensor(gradient)] if sharded else gradients
    norms = [local_norm(group) for group in by_device(plain)]
    if sharded:
        norms += sharded_norm.norms_of_dtensors(sharded, norm_type, local_norm)
    if len(norms) == 1 and not sharded:
        return norms[0]
    device = sharded_norm.local_of(gradients[0]).device
    norm = reference.norm_of_norms([norm.to(device, torch.float64) for norm in norms], norm_type)
    return norm.to(reference.result_type(gradients))


def _clip_elsewhere(
    items: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool, kernel: str | None
) -> Tensor:
    """Clipping where one table does not reach: torch scales."""
    gradients = collect(items, True)
    norm = _norm_of(gradients, norm_type, kernel)
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    with torch.no_grad():
        local = [sharded_norm.local_memory(gradient) for gradient in gradients]
        reference.scale_(without_repeats(local), reference.clip_coefficient(norm, max_norm))
    return norm


def _check_finite(norm: Tensor, norm_type: float) -> None:
    """RuntimeError, as torch raises it. The host waits for the norm."""
    if not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is non-finite ({norm.item()}), so nothing was "
            "clipped. perfdoctor.grad_stats finds the parameter; error_if_nonfinite=False scales by it all the same."
        )


def _compiled_gradients(items: list[Tensor], always_grad: bool) -> tuple[list[Tensor], bool]:
    """What the custom ops take, while torch.compile traces: gradients, and whether they are parameters'."""
    gradients = []
    once = always_grad
    for item in items:
        once = once or walker.is_parameter(item)
        gradient = walker.gradient_of(item, always_grad)
        if gradient is not None:
            gradients.append(gradient)
    return gradients, once


def _clip_compiled(items: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    gradients, once = _compiled_gradients(items, True)
    if not gradients:
        return torch.tensor(0.0)
    if error_if_nonfinite:
        _check_finite(custom_ops.grad_norm(gradients, norm_type, once), norm_type)
    norm: Tensor = custom_ops.clip_grads_(gradients, max_norm, norm_type, once)
    return norm


def norm_of_gradients(gradients: list[Tensor], norm_type: float, once: bool) -> Tensor:
    """`grad_norm` of gradients themselves; `once`: a second mention of the same memory does not count."""
    return _norm_of(without_repeats(gradients) if once else gradients, norm_type, None)


def clip_gradients_(gradients: list[Tensor], max_norm: float, norm_type: float, once: bool) -> Tensor:
    """`clip_grad_norm_` of gradients themselves."""
    unique = without_repeats(gradients)
    what = launch_route.kernel_norm_of(norm_type)
    simple = len(by_device(unique)) == 1 and all(walker.is_simple(gradient) for gradient in unique)
    table = launch_route.device_table([gradient.detach() for gradient in unique], None) if simple else None
    if table is None or what is None or table.is_empty or not (once or len(unique) == len(gradients)):
        norm = _norm_of(unique if once else gradients, norm_type, None)
        reference.scale_(unique, reference.clip_coefficient(norm, max_norm))
        return norm
    launcher = launch_route.launcher(None)
    with table.lock:
        result: Tensor = launcher.norm(table, what, max_norm)
        launcher.scale(table)
    return result


__all__ = ["GradStats", "GradTable", "Statistics", "clip_grad_norm_", "grad_norm", "grad_stats"]
