"""Launches of the Triton kernels over a pointer table.

The first launch of a kernel goes through Triton, which compiles it; from the second on the compiled walker launches it
with prepared arguments, because Triton's own launch costs the host more time than a small kernel runs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from perfdoctor.errors import UsageError
from perfdoctor.kernels import pointer_table
from perfdoctor.kernels.pointer_table import GradTable
from perfdoctor.kernels.walker import compiled_walker
from perfdoctor.kernels.work_list import TILE

_NUM_WARPS = 8  # 256 threads x 16 bytes = one tile
_OUT, _MAX_NORM = 3, 5  # where grad_norm_kernel takes what changes from call to call
_NORM_SIZES = (8, 8, 8, 8, 8, 4, 4, 4)
_SCALE_SIZES = (8, 8, 4)

_log = logging.getLogger("perfdoctor")


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
    # Four programs of 256 threads share a multiprocessor at 64 registers a thread; the one for mixed types needs 74.
    grid = table.programs(3 if pointer_table.is_mixed(table) else 4, table.work.num_items)
    arguments = (table.slots, table.program_parts, table.counter, out, table.coefficient, float(max_norm),
                 table.work.num_chunks, table.work.num_items)  # fmt: skip
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
    grid = table.programs(8, table.work.num_slots)
    arguments = (table.slots, table.coefficient, table.work.num_slots)
    compiled = _launch(kernels().scale, table, grid, arguments, {"DTYPE": table.work.element, "TILE": TILE})
    _prepare(table, "scale", compiled, grid, arguments, _SCALE_SIZES)


def stats(table: GradTable) -> tuple[Tensor, Tensor]:
    """float32 [4, num_tensors + 1] (sum, mean, L2, largest magnitude) and int64 counts; the total comes last."""
    work = table.work
    num_tensors = len(work.num_elements)
    out = torch.empty((4, num_tensors + 1), dtype=torch.float32, device=table.device)
    counts = torch.empty(num_tensors + 1, dtype=torch.int64, device=table.device)
    if table.parts is None:
        table.parts = pointer_table.scratch(table, 4 * work.num_parts)
    # float32 fits three programs to a multiprocessor in 80 registers a thread, the others two in 128.
    is_float32 = work.element == 0
    grid = table.programs(3 if is_float32 else 2, work.num_slots)
    arguments = (table.slots, table.parts, table.program_parts, table.counter, out, counts, work.num_slots,
                 work.num_parts, int(work.num_elements.sum()), num_tensors)  # fmt: skip
    options = {"DTYPE": work.element, "TILE": TILE, "SPAN": _span(grid)}
    _launch(kernels().stats, table, grid, arguments, options, maxnreg=80 if is_float32 else 128)
    per_tensor = (table.parts, table.first_part, table.num_elements, out, counts, work.num_parts, num_tensors)
    _launch(kernels().per_tensor, table, num_tensors, per_tensor, {"SPAN": 128}, num_warps=1)
    return out, counts


def _span(grid: int) -> int:
    return max(1024, 1 << (grid - 1).bit_length())


def _launch(kernel: Any, table: GradTable, grid: int, arguments: tuple[Any, ...], constants: dict[str, Any],
            num_warps: int = _NUM_WARPS, maxnreg: int | None = None) -> Any:  # fmt: skip
    if table.device.type == "cpu":
        return kernel[(grid,)](*arguments, **constants)
    options = {"num_warps": num_warps}
    if maxnreg is not None and torch.version.cuda is not None:
        options["maxnreg"] = maxnreg
    capturing = torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(table.device), pointer_table.relaxed_capture() if capturing else contextlib.nullcontext():
        return kernel[(grid,)](*arguments, **constants, **options)


def _prepare(table: GradTable, name: Any, compiled: Any, grid: int, arguments: tuple[Any, ...],
             sizes: tuple[int, ...]) -> None:  # fmt: skip
    """Keeps the compiled kernel with its arguments for the next launches, where the walker could be compiled."""
    module = compiled_walker()
    if module is None or table.device.type == "cpu":
        return
    values = [value.data_ptr() if isinstance(value, Tensor) else int(value) for value in arguments]
    try:
        threads = 32 * int(compiled.metadata.num_warps)
        function, shared = int(compiled.function), int(compiled.metadata.shared)
        with torch.cuda.device(table.device):
            table.launches[name] = module.Launch(function, grid, threads, shared, values, list(sizes))
    except (AttributeError, TypeError, RuntimeError) as error:
        _log.info("this Triton's kernels are launched through Triton: %s", error)
