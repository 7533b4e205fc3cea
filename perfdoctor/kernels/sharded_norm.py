"""Norms of DTensor gradients (FSDP2, tensor parallel): each rank reads its shards, ranks that hold others add theirs.

    total^p = sum over groups of all_reduce(local^p) over the mesh dimensions that the group is sharded on

Replicated dimensions are not reduced (each rank holds it all), partial sums are resolved first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from perfdoctor.errors import UsageError

LocalNorm = Callable[[list[Tensor]], Tensor]


def is_dtensor(gradient: Tensor) -> bool:
    """Whether the gradient is a DTensor (asked without importing torch.distributed)."""
    return type(gradient) is not Tensor and hasattr(gradient, "placements") and hasattr(gradient, "device_mesh")


def local_memory(gradient: Any) -> Tensor:
    """This rank's part, the memory itself; autograd sees what is written to it."""
    local: Tensor = gradient.to_local() if is_dtensor(gradient) else gradient
    return local


def local_of(gradient: Any) -> Tensor:
    """This rank's part, for reading."""
    return local_memory(gradient).detach()


def norms_of_dtensors(gradients: Sequence[Any], norm_type: float, local_norm: LocalNorm) -> list[Tensor]:
    """One global norm (float64 []) for each mesh and set of sharded dimensions. All ranks of a mesh must call this."""
    if not norm_type > 0:
        raise UsageError(f"norm_type={norm_type} does not add up over shards: use a positive order or inf")
    groups: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        whole = _without_partial(gradient)
        key = (whole.device_mesh, _sharded_dimensions(whole))
        groups.setdefault(key, []).append(local_of(whole))
    return [
        _reduce(local_norm(shards).double(), norm_type, mesh, dimensions)
        for (mesh, dimensions), shards in groups.items()
    ]


def _without_partial(gradient: Any) -> Any:
    from torch.distributed.tensor import Replicate

    if not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    return gradient.redistribute(gradient.device_mesh, placements)


def _sharded_dimensions(gradient: Any) -> tuple[int, ...]:
    from torch.distributed.tensor import Shard

    dimensions = []
    for dimension, placement in enumerate(gradient.placements):
        if isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard":
            dimensions.append(dimension)
        elif not placement.is_replicate():
            raise UsageError(f"a gradient is placed as {placement}: Shard, Replicate and Partial can be summed over")
    return tuple(dimensions)


def _reduce(norm: Tensor, norm_type: float, mesh: Any, dimensions: tuple[int, ...]) -> Tensor:
    """The norm over all ranks along these mesh dimensions."""
    from torch import distributed

    if not dimensions:
        return norm
    if norm_type == math.inf:
        # A maximum over ranks may lose a NaN: it travels beside it.
        value = torch.stack((norm.nan_to_num(nan=0.0, posinf=math.inf), norm.isnan().double()))
        operation = distributed.ReduceOp.MAX
    else:
        value = norm.pow(norm_type)
        operation = distributed.ReduceOp.SUM
    for dimension in dimensions:
        distributed.all_reduce(value, operation, group=mesh.get_group(dimension))
    if norm_type == math.inf:
        return torch.where(value[1] > 0, math.nan, value[0])
    return value.pow(1.0 / norm_type)
