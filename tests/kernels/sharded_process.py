"""One of two processes of test_sharded_norm.py: argv is rank, the file they meet in, and cpu (gloo) or cuda (NCCL)."""

from __future__ import annotations

import math
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from perfdoctor.kernels.grad_stats import clip_grad_norm_, grad_norm

RANK = int(sys.argv[1])
DEVICE = sys.argv[3]


def close(found: Tensor, expected: float, rel: float = 1e-6) -> None:
    assert not isinstance(found, DTensor), "a plain tensor, the same on every rank"
    assert abs(float(found) - expected) <= rel * expected, (RANK, float(found), expected)


def parameter_with(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(gradient.detach().clone() * 0)
    parameter.grad = gradient
    return parameter


def main() -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(RANK)
    torch.set_default_device(DEVICE)
    dist.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2
    )
    torch.manual_seed(0)  # the same full tensors on both ranks
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("shard",))
    other = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("replicate", "shard"))
    rows, uneven, copies, columns, plain = (torch.randn(*shape) for shape in ((6, 4), (5, 3), (7,), (3, 8), (11,)))
    gradients: list[Tensor] = [
        distribute_tensor(rows, mesh, [Shard(0)]),
        distribute_tensor(uneven, mesh, [Shard(0)]),  # 3 rows and 2
        distribute_tensor(copies, mesh, [Replicate()]),  # on both ranks: counts once
        distribute_tensor(columns, other, [Replicate(), Shard(1)]),
        plain,
    ]
    full = [rows, uneven, copies, columns, plain]
    flat = torch.cat([tensor.double().reshape(-1) for tensor in full])
    for norm_type in (2.0, math.inf, 1.0):
        close(grad_norm(gradients, norm_type), float(torch.linalg.vector_norm(flat, norm_type)))
    # Each rank holds half of the sum: the norm of the sum, not of the halves.
    pending = DTensor.from_local(copies * (0.25 if RANK else 0.75), mesh, [Partial()])
    close(grad_norm([pending]), float(copies.double().norm()))
    # More ranks than rows: one rank holds nothing.
    close(grad_norm([distribute_tensor(torch.full((1, 4), 3.0), mesh, [Shard(0)])]), 6.0)
    poisoned = distribute_tensor(torch.tensor([1.0, math.nan, 2.0, 3.0]), mesh, [Shard(0)])
    assert math.isnan(float(grad_norm([poisoned], math.inf)))
    assert math.isnan(float(grad_norm([poisoned])))

    expected = float(flat.norm())
    parameters = [parameter_with(gradient) for gradient in gradients]
    close(clip_grad_norm_(parameters, 1.0), expected)
    close(grad_norm(parameters), 1.0, rel=1e-5)
    whole = parameters[0].grad.full_tensor()  # type: ignore[union-attr]
    torch.testing.assert_close(whole, rows / (expected + 1e-6))
    dist.destroy_process_group()


main()
