"""The CUDA C++ twin of the Triton kernels (grad_stats.cu), compiled on first use; it reads the same pointer table."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from perfdoctor.errors import UsageError
from perfdoctor.kernels import pointer_table
from perfdoctor.kernels.extension import load_extension
from perfdoctor.kernels.pointer_table import GradTable


@functools.cache
def compiled_twin() -> Any:
    """The extension module. Raises UsageError where there is no CUDA compiler."""
    major, minor = torch.cuda.get_device_capability()
    architecture = f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"
    try:
        return load_extension("perfdoctor_grad_stats", ["grad_stats.cpp", "grad_stats.cu"], ["-O3", architecture])
    except Exception as error:
        raise UsageError(f"grad_stats.cu could not be compiled: use kernel='triton'. {error}") from error


def norm(table: GradTable, what: int, max_norm: float) -> Tensor:
    """As `triton_launch.norm`."""
    out = torch.empty((), dtype=torch.float32, device=table.device)
    grid = table.programs(4, table.work.num_items)
    with torch.cuda.device(table.device):
        compiled_twin().norm(
            table.slots.data_ptr(), table.program_parts.data_ptr(), table.counter.data_ptr(), out.data_ptr(),
            table.coefficient.data_ptr(), float(max_norm), table.work.num_chunks, table.work.num_items, what, grid,
            table.stream,
        )  # fmt: skip
    return out


def scale(table: GradTable) -> None:
    """As `triton_launch.scale`."""
    grid = table.programs(8, table.work.num_slots)
    with torch.cuda.device(table.device):
        compiled_twin().scale(
            table.slots.data_ptr(), table.coefficient.data_ptr(), table.work.num_slots, grid, table.stream
        )


def stats(table: GradTable) -> tuple[Tensor, Tensor]:
    """As `triton_launch.stats`."""
    work = table.work
    num_tensors = len(work.num_elements)
    parts, out, counts = pointer_table.room_for_stats(table)
    grid = table.programs(3, work.num_slots)
    with torch.cuda.device(table.device):
        compiled_twin().stats(
            table.slots.data_ptr(), parts.data_ptr(), table.program_parts.data_ptr(), table.counter.data_ptr(),
            table.first_part.data_ptr(), table.num_elements.data_ptr(), out.data_ptr(), counts.data_ptr(),
            work.num_slots, work.num_parts, int(work.num_elements.sum()), num_tensors, grid, table.stream,
        )  # fmt: skip
    return out, counts
