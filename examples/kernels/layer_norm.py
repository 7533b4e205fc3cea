"""out = skip + relu(layer_norm(x)): the end of a residual block, in one kernel instead of three.

Unfused: LayerNorm reads and writes, ReLU reads and writes, the sum reads two and writes one: seven passes over memory.
Fused: three. Forward and backward. `python examples/kernels/layer_norm.py`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from tiling import num_programs
from torch import Tensor
from torch.autograd.function import once_differentiable
from variants import Variant, check_alike, show

TITLE = "LayerNorm + ReLU + skip"
ROOF = "copy"
SHAPES = {"65536 x 4096": (65536, 4096)}
# Against float64. float32: sums of a row in another order. The two-byte types: the rounding of the result, plus that.
TOLERANCE = {torch.float32: (1e-6, 4e-6), torch.float16: (5e-4, 4e-6), torch.bfloat16: (3.95e-3, 4e-6)}
EPS = 1e-5

LONGEST_IN_REGISTERS = 16384
"""columns; longer rows go the unfused way: x, skip and the parameters would not fit"""


@triton.jit
def _forward_kernel(
    x, skip, weight, bias, out, mean_of, rstd_of, num_rows, num_columns, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows in registers: mean, variance about the mean, then all up to the sum. KEEP: for backward."""
    columns = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    for group in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = group * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (rows < num_rows) & (columns < num_columns)
        places = rows.to(tl.int64) * num_columns + columns
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        beside = tl.load(skip + places, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(values, axis=1)[:, None] / num_columns
        # Two passes over registers cost nothing; mean(x^2) - mean^2 would cancel where the mean is large.
        centred = tl.where(inside, values - mean, 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1)[:, None] / num_columns + eps)
        normed = centred * rstd * scale + shift
        result = beside + tl.where(normed <= 0.0, 0.0, normed)  # a NaN is not below zero: it stays, as in PyTorch
        tl.store(out + places, result.to(out.dtype.element_ty), mask=inside, cache_modifier=STORE)
        if KEEP:
            tl.store(mean_of + rows, mean, mask=rows < num_rows)
            tl.store(rstd_of + rows, rstd, mask=rows < num_rows)


@triton.jit
def _backward_kernel(
    x, weight, bias, mean_of, rstd_of, grad_out, grad_x, grad_weight, grad_bias, num_rows, num_columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes every `num_programs`-th row and adds up its share of both parameters' gradients in registers.

    The shares, float32 [programs, num_columns], are summed afterwards: no atomics, so repeats agree bit for bit. What
    ReLU let through is worked out again from x: reading it would be another pass.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    of_scale = tl.zeros([BLOCK], tl.float32)
    of_shift = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places = tl.cast(row, tl.int64) * num_columns + columns
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(grad_out + places, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_of + row)
        normed = tl.where(inside, (values - tl.load(mean_of + row)) * rstd, 0.0)
        above = tl.where(normed * scale + shift <= 0.0, 0.0, above)
        of_scale += above * normed
        of_shift += above
        above *= scale
        along = tl.sum(above * normed, axis=0) / num_columns
        result = rstd * (above - tl.sum(above, axis=0) / num_columns - normed * along)
        tl.store(grad_x + places, result.to(grad_x.dtype.element_ty), mask=inside)
    share = tl.program_id(0).to(tl.int64) * num_columns + columns
    tl.store(grad_weight + share, of_scale, mask=inside)
    tl.store(grad_bias + share, of_shift, mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """How the rows are laid over programs. `str()` of it is its line in the table of `--tune`."""

    num_warps: int
    rows: int = 1
    programs: int | None = None
    """programs a multiprocessor, which take rows in turn and read the parameters once; None: one program a group"""
    store: str = ""

    def __str__(self) -> str:
        grid = "a program a row" if self.programs is None else f"{self.programs} programs an SM"
        return f"{self.num_warps} warps, {grid}, store {self.store or '-'}"


def plan_for(num_columns: int) -> RowPlan:
    """What is used without a plan."""
    block = triton.next_power_of_2(num_columns)
    rows = max(1, 2048 // block)
    # 32 values a thread: 4 warps gave 4.40 TB/s for rows of 4096 on an H200, 8 and 16 gave 4.03 and 4.09.
    return RowPlan(num_warps=min(32, max(4, block * rows // 1024)), rows=rows)


class _FusedBlock(torch.autograd.Function):
    """skip + relu(layer_norm(x)) with its backward; the gradient of `skip` is the incoming one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, eps: float, plan: RowPlan) -> Tensor:
        num_columns = x.shape[-1]
        num_rows = x.numel() // num_columns
        out = torch.empty_like(x)
        keeps = any(ctx.needs_input_grad)
        mean, rstd = torch.empty((2, num_rows if keeps else 0), dtype=torch.float32, device=x.device)
        grid = num_programs(triton.cdiv(num_rows, plan.rows), plan.programs, x.device)
        _forward_kernel[(grid,)](
            x, skip, weight, bias, out, mean, rstd, num_rows, num_columns, eps, ROWS=plan.rows,
            BLOCK=triton.next_power_of_2(num_columns), KEEP=keeps, STORE=plan.store, num_warps=plan.num_warps,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return out

    @staticmethod
    @once_differentiable  # twice is an error, not a gradient that ends here in silence
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias, mean, rstd = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        num_columns = x.shape[-1]
        num_rows = x.numel() // num_columns
        block = triton.next_power_of_2(num_columns)
        grad_x = torch.empty_like(x)
        grid = num_programs(num_rows, 2, x.device) if x.device.type == "cuda" else min(num_rows, 4)
        shares = torch.empty((2, grid, num_columns), dtype=torch.float32, device=x.device)
        _backward_kernel[(grid,)](
            x, weight, bias, mean, rstd, grad_out, grad_x, shares[0], shares[1], num_rows, num_columns, BLOCK=block,
            num_warps=min(32, max(4, block // 256)),
        )  # fmt: skip
        of_weight, of_bias = shares.sum(dim=1)
        return grad_x, grad_out, of_weight.to(weight.dtype), of_bias.to(bias.dtype), None, None


def block_unfused(x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS) -> Tensor:
    """Three kernels."""
    return skip + torch.relu(F.layer_norm(x, x.shape[-1:], weight, bias, eps))


@functools.cache
def _compiled_block() -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = torch.compile(block_unfused, dynamic=False)
    return function


def block_compiled(x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same by torch.compile."""
    return _compiled_block()(x, skip, weight, bias)


def _long_rows(x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The unfused way in float32, rounded once: in half precision each of its three steps would round the row again."""
    return block_unfused(x.float(), skip.float(), weight.float(), bias.float(), eps).to(x.dtype)


def block_triton(
    x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS, plan: RowPlan | None = None
) -> Tensor:
    """The same in one kernel, with gradients for all four. x and skip [..., columns], weight and bias [columns].

    Raises ValueError for tensors that are not contiguous or not alike. Rows longer than `LONGEST_IN_REGISTERS` and
    empty tensors go the unfused way, in float32.
    """
    check_alike(x, skip)
    check_alike(weight, bias)
    if x.dim() == 0 or weight.shape != x.shape[-1:] or weight.device != x.device:
        raise ValueError(
            f"weight {tuple(weight.shape)} on {weight.device} for rows of x {tuple(x.shape)} on {x.device}: give one "
            "weight a column, beside x"
        )
    num_columns = x.shape[-1]
    if not x.numel() or num_columns > LONGEST_IN_REGISTERS:
        return _long_rows(x, skip, weight, bias, eps)
    result: Tensor = _FusedBlock.apply(x, skip, weight, bias, eps, plan or plan_for(num_columns))
    return result


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """x, skip, weight and bias."""
    x, skip = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    weight, bias = (torch.randn(shape[-1:], dtype=dtype, device=device) for _ in range(2))
    return x, skip, weight, bias


def reference(x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """In float64."""
    return block_unfused(x.double(), skip.double(), weight.double(), bias.double())


def num_pass_bytes(x: Tensor, *_: Tensor) -> int:
    """One read or write of a tensor like x; the parameters do not show beside it."""
    return x.numel() * x.element_size()


VARIANTS = (
    Variant(name="torch, unfused", run=block_unfused, passes=7, roundings=3),
    Variant(name="torch.compile", run=block_compiled, passes=3, roundings=3, kind="compile"),
    Variant(name="Triton", run=block_triton, passes=3, kind="triton"),
)


def configurations() -> Iterator[Variant]:
    """What may be chosen otherwise, for rows of 4096 columns."""
    plans = [RowPlan(num_warps=warps) for warps in (4, 8, 16)]
    plans += [RowPlan(num_warps=16, store=".cs"), RowPlan(num_warps=8, programs=2), RowPlan(num_warps=16, programs=2)]
    for plan in plans:
        yield Variant(name=f"Triton: {plan}", run=partial(block_triton, plan=plan), passes=3, kind="triton")


if __name__ == "__main__":
    raise SystemExit(show("layer_norm"))
