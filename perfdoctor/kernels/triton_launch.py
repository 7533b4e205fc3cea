"""Launches of the Triton kernels over a pointer table (see `kernel_launch`)."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from perfdoctor.errors import UsageError
from perfdoctor.kernels import kernel_launch, pointer_table
from perfdoctor.kernels.pointer_table import GradTable
from perfdoctor.kernels.walker import compiled_walker
from perfdoctor.kernels.work_list import TILE

_NUM_WARPS = 8  # 256 threads x 16 bytes = one tile
_OUT, _MAX_NORM = 3, 5  # where grad_norm_kernel takes what changes from call to call
_NORM_SIZES = (8, 8, 8, 8, 8, 4, 4, 4, 4)
_SCALE_SIZES = (8, 8, 4)
_COLUMN_SIZES = (8, 8, 8, 8, 8, 4, 4)
_STATS_OUT, _COLUMN_OUT = 4, 3  # where the two kernels of the statistics take `out`, with `counts` behind it
_SCALE_PROGRAMS = 6  # of 256 threads with 34 registers each


@functools.cache
def kernels() -> SimpleNamespace:
    """The kernels by name; the first call imports Triton."""
    try:
        from perfdoctor.kernels import grad_stats_triton, scale_triton
    except ImportError as error:
        raise UsageError("Triton is not installed: pass kernel='cuda' or kernel='torch'") from error
    return SimpleNamespace(
        norm=grad_stats_triton.grad_norm_kernel,
        stats=grad_stats_triton.grad_stats_kernel,
        per_tensor=grad_stats_triton.per_tensor_kernel,
        scale=scale_triton.scale_kernel,
    )


@functools.cache
def is_interpreting() -> bool:
    """Whether Triton runs its kernels in Python, on CPU tensors."""
    import triton

    kind = type(kernels().norm).__name__
    return bool(kind == "InterpretedFunction" or getattr(triton.knobs.runtime, "interpret", False))


def norm(table: GradTable, what: int, max_norm: float) -> Tensor:
    """The total norm, float32 []; leaves the clip coefficient in `table.coefficient`."""
    prepared = table.launches.get(("norm", what))
    if prepared is not None:
        out: Tensor = prepared.run_scalar(table.stream, table.coefficient, _OUT, _MAX_NORM, max_norm)
        return out
    out = torch.empty((), dtype=torch.float32, device=table.device)
    # Measured on an H200, programs a multiprocessor, 5.3 GB: 2 took 1209 us, 3 took 1169, 4 took 1248, 5 took 1183.
    grid = table.programs(pointer_table.NORM_PROGRAMS, table.work.num_items)
    arguments = (table.slots, table.program_parts, table.counter, out, table.coefficient, float(max_norm),
                 table.work.num_chunks, table.work.num_items, table.num_kept)  # fmt: skip
    options = {"DTYPE": table.work.element, "WHAT": what, "TILE": TILE, "SPAN": _span(grid)}
    compiled = _launch(kernels().norm, table, grid, arguments, options)
    _prepare(table, ("norm", what), compiled, grid, arguments, _NORM_SIZES)
    return out


def scale(table: GradTable) -> None:
    """Multiplies every gradient by `table.coefficient` where that is below one (or NaN)."""
    prepared = table.launches.get("scale")
    if prepared is not None:
        prepared.run(table.stream)
        return
    grid = table.programs(_SCALE_PROGRAMS, table.work.num_slots)
    arguments = (table.slots, table.coefficient, table.work.num_slots)
    options = {"DTYPE": table.work.element, "TILE": TILE, "SPAN": table.scale_span, "STORE": table.scale_store}
    compiled = _launch(kernels().scale, table, grid, arguments, options)
    _prepare(table, "scale", compiled, grid, arguments, _SCALE_SIZES)


def stats(table: GradTable) -> tuple[Tensor, Tensor]:
    """float32 [4, num_tensors + 1] (sum, mean, L2, largest magnitude) and int64 counts; the total comes last."""
    work = table.work
    num_tensors = len(work.num_elements)
    prepared = table.launches.get("stats"), table.launches.get("per_tensor")
    module = compiled_walker() if prepared[0] is not None else None
    if module is not None and prepared[1] is not None:
        result = module.run_stats(*prepared, table.stream, table.coefficient, num_tensors + 1, _STATS_OUT, _COLUMN_OUT)
        return result[0], result[1]
    parts, out, counts = pointer_table.room_for_stats(table)
    # float32 fits three programs to a multiprocessor in 80 registers a thread, the others two in 128.
    is_float32 = work.element == 0
    grid = table.programs(3 if is_float32 else 2, work.num_slots)
    arguments = (table.slots, parts, table.program_parts, table.counter, out, counts, work.num_slots,
                 work.num_parts, int(work.num_elements.sum()), num_tensors)  # fmt: skip
    options = {"DTYPE": work.element, "TILE": TILE, "SPAN": _span(grid)}
    compiled = _launch(kernels().stats, table, grid, arguments, options, maxnreg=80 if is_float32 else 128)
    # Triton passes the number of elements in eight bytes where four are too few.
    sizes = (8, 8, 8, 8, 8, 8, 4, 4, 4 if arguments[8] < 1 << 31 else 8, 4)
    _prepare(table, "stats", compiled, grid, arguments, sizes)
    per_tensor = (parts, table.first_part, table.num_elements, out, counts, work.num_parts, num_tensors)
    compiled = _launch(kernels().per_tensor, table, num_tensors, per_tensor, {"SPAN": 128}, num_warps=1)
    _prepare(table, "per_tensor", compiled, num_tensors, per_tensor, _COLUMN_SIZES)
    return out, counts


def _span(grid: int) -> int:
    return max(1024, 1 << (grid - 1).bit_length())


def _launch(kernel: Any, table: GradTable, grid: int, arguments: tuple[Any, ...], constants: dict[str, Any],
            num_warps: int = _NUM_WARPS, maxnreg: int | None = None) -> Any:  # fmt: skip
    return kernel_launch.launch(kernel, table.device, grid, arguments, constants, num_warps, maxnreg)


def _prepare(table: GradTable, name: Any, compiled: Any, grid: int, arguments: tuple[Any, ...],
             sizes: tuple[int, ...]) -> None:  # fmt: skip
    """Keeps the compiled kernel with its arguments for the next launches, where the walker could be compiled."""
    prepared = kernel_launch.prepare(compiled, table.device, grid, arguments, sizes)
    if prepared is not None:
        table.launches[name] = prepared
