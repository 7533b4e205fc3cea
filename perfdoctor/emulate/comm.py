"""What `nn.DataParallel` asks of a build with CUDA: to spread a batch over the devices, of which there is one here."""

from __future__ import annotations

from typing import Any

import torch

from perfdoctor.emulate.patches import Patches
from perfdoctor.emulate.tensor import CUDA


def install(patches: Patches) -> None:
    """Answer for `torch._C._scatter` and `_gather` until `patches` is undone."""
    patches.set(torch._C, "_scatter", _scatter)
    patches.set(torch._C, "_gather", _gather)


def _scatter(
    tensor: torch.Tensor, devices: Any, chunk_sizes: Any = None, dim: int = 0, streams: Any = None
) -> tuple[torch.Tensor, ...]:
    return (tensor.to(CUDA, non_blocking=True),)  # torch copies so too: only pageable memory makes the host wait


def _gather(tensors: Any, dim: int = 0, destination_index: int | None = None) -> torch.Tensor:
    gathered = torch.cat(tuple(tensors), dim)
    return gathered.cpu() if destination_index == -1 else gathered
