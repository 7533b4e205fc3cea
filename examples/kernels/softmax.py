"""Softmax over the last dimension, rows of any length.

A row that fits into the registers of one program is read once and written once. A longer one is read twice: once for
its maximum and its sum together (online softmax), once to write the result. `python examples/kernels/softmax.py`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from tiling import num_programs
from torch import Tensor
from variants import Variant, check_alike, check_forward_only, show

TITLE = "row softmax"
ROOF = "copy"
SHAPES = {"16384 x 16384": (16384, 16384), "2048 x 131072": (2048, 131072)}
# Against float64. The exp's argument is wrong by half an ulp of the largest |x - max|, some 20 here: 1e-6 relative.
TOLERANCE = {torch.float32: (3e-6, 1e-10), torch.float16: (5e-4, 6e-8), torch.bfloat16: (3.95e-3, 1e-10)}

LONGEST_IN_REGISTERS = 32768
"""columns: 32 warps then hold 32 float32 values a thread; with 64 they would have no registers left"""


@triton.jit
def _softmax(values):
    """Of each row of a block in registers. A row of nothing but -inf becomes NaN by itself: (-inf) - (-inf)."""
    grown = tl.exp(values - tl.max(values, axis=1)[:, None])
    return grown * (1.0 / tl.sum(grown, axis=1)[:, None])


@triton.jit
def _whole_row_kernel(x, out, BLOCK: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr):
    """A row of exactly BLOCK columns a program. Without masks and loop each value needs its register and little else.

    Three rows of 16384 then fit the registers of a multiprocessor (16 warps, 40 registers a thread), not two.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK  # one 64-bit address; what is added to it stays in 32 bits
    columns = tl.arange(0, BLOCK)[None, :]
    values = tl.load(x + row + columns, eviction_policy=LOAD).to(tl.float32)
    tl.store(out + row + columns, _softmax(values).to(out.dtype.element_ty), cache_modifier=STORE)


@triton.jit
def _row_kernel(
    x,
    out,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """ROWS whole rows at a time in registers: maximum, exp, sum, quotient. One read, one write.

    With more groups of rows than programs and STAGES > 1, the next rows are on their way to shared memory while these
    are worked on.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    for group in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = group * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (rows < num_rows) & (columns < num_columns)
        places = rows.to(tl.int64) * num_columns + columns
        values = tl.load(x + places, mask=inside, other=-float("inf"), eviction_policy=LOAD).to(tl.float32)
        share = _softmax(values)
        tl.store(out + places, share.to(out.dtype.element_ty), mask=inside, cache_modifier=STORE)


@triton.jit
def _long_row_kernel(x, out, num_columns, TILE: tl.constexpr, STORE: tl.constexpr):
    """Online softmax, one program a row: each lane keeps the maximum of what it has seen, and its sum relative to it.

    A new maximum rescales the sum. The lanes come together once, at the end. The second read goes backwards: what was
    read last is still in the L2 cache.
    """
    row = tl.program_id(0).to(tl.int64) * num_columns
    lanes = tl.arange(0, TILE)
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, num_columns, TILE):
        inside = lanes < num_columns - start
        values = tl.load(x + row + start + lanes, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, values)
        base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing but -inf so far: its sum is 0, not NaN
        total = total * tl.exp(top - base) + tl.exp(values - base)
        top = higher
    row_top = tl.max(top, axis=0)
    factor = 1.0 / tl.sum(total * tl.exp(top - row_top), axis=0)  # all -inf: NaN, as in PyTorch
    num_tiles = tl.cdiv(num_columns, TILE)
    for behind in range(num_tiles):
        start = (num_tiles - 1 - behind) * TILE
        inside = lanes < num_columns - start
        values = tl.load(x + row + start + lanes, mask=inside, other=0.0).to(tl.float32)
        share = tl.exp(values - row_top) * factor
        tl.store(out + row + start + lanes, share.to(out.dtype.element_ty), mask=inside, cache_modifier=STORE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """How the rows are laid over programs. `str()` of it is its line in the table of `--tune`."""

    num_warps: int
    rows: int = 1
    """rows a program works on at a time"""
    programs: int | None = None
    """programs a multiprocessor, which take rows in turn; None: one program a group of rows"""
    stages: int = 1
    """how many groups of rows are in shared memory or on their way there"""
    registers: int | None = None
    """most registers a thread, so that more programs fit a multiprocessor; None: as many as the compiler wants"""
    load: str = ""
    """the loads' eviction policy: "evict_first" costs 4 % on an H200"""
    store: str = ""
    """the stores' cache modifier: ".cs", cache streaming, changes nothing there"""
    tile: int | None = None
    """online softmax with tiles of so many columns"""

    def __str__(self) -> str:
        grid = "a program a row" if self.programs is None else f"{self.programs} programs an SM, {self.stages} stages"
        what = "in registers" if self.tile is None else f"online, tiles of {self.tile}"
        most = "" if self.registers is None else f", {self.registers} registers"
        return f"{what}, {self.num_warps} warps, {grid}{most}, load {self.load or '-'}, store {self.store or '-'}"


def plan_for(num_columns: int) -> RowPlan:
    """What is used without a plan."""
    if num_columns > LONGEST_IN_REGISTERS:
        return RowPlan(num_warps=16, tile=8192)
    block = triton.next_power_of_2(num_columns)
    rows = max(1, 2048 // block)  # short rows: several a program, or most of its threads would idle
    return RowPlan(num_warps=min(32, max(4, block * rows // 512)), rows=rows)


def softmax_triton(x: Tensor, plan: RowPlan | None = None) -> Tensor:
    """Softmax over the last dimension of a contiguous tensor; 0-dimensional tensors and empty ones included.

    Raises ValueError for tensors that are not contiguous, of another dtype, or that want a gradient: there is no
    backward.
    """
    check_alike(x)
    check_forward_only(x)
    out = torch.empty_like(x)
    if not x.numel():
        return out
    num_columns = x.shape[-1] if x.dim() else 1
    num_rows = x.numel() // num_columns
    plan = plan or plan_for(num_columns)
    if plan.tile is not None:
        _long_row_kernel[(num_rows,)](x, out, num_columns, TILE=plan.tile, STORE=plan.store, num_warps=plan.num_warps)
        return out
    options = {} if plan.registers is None else {"maxnreg": plan.registers}
    block = triton.next_power_of_2(num_columns)
    if block == num_columns and plan.rows == 1 and plan.programs is None:
        _whole_row_kernel[(num_rows,)](
            x, out, BLOCK=block, LOAD=plan.load, STORE=plan.store, num_warps=plan.num_warps, **options
        )
        return out
    grid = num_programs(triton.cdiv(num_rows, plan.rows), plan.programs, x.device)
    _row_kernel[(grid,)](
        x, out, num_rows, num_columns, ROWS=plan.rows, BLOCK=block, STAGES=plan.stages,
        LOAD=plan.load, STORE=plan.store, num_warps=plan.num_warps, **options,
    )  # fmt: skip
    return out


def softmax_by_hand(x: Tensor) -> Tensor:
    """Five kernels: maximum, difference, exp, sum, quotient."""
    if not x.numel():
        return torch.empty_like(x)  # a maximum of nothing is an error
    grown = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return grown / grown.sum(dim=-1, keepdim=True)


def softmax_torch(x: Tensor) -> Tensor:
    """PyTorch's own: one kernel."""
    return torch.softmax(x, dim=-1)


@functools.cache
def _compiled_torch() -> Callable[[Tensor], Tensor]:
    function: Callable[[Tensor], Tensor] = torch.compile(softmax_torch, dynamic=False)
    return function


def softmax_compiled(x: Tensor) -> Tensor:
    """The same by torch.compile."""
    return _compiled_torch()(x)


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor]:
    """x."""
    return (3 * torch.randn(shape, dtype=dtype, device=device),)


def reference(x: Tensor) -> Tensor:
    """In float64."""
    return torch.softmax(x.double(), dim=-1)


def num_pass_bytes(x: Tensor) -> int:
    """One read or write of a tensor like x."""
    return x.numel() * x.element_size()


def _num_passes(x: Tensor) -> int:
    return 2 if x.shape[-1] <= LONGEST_IN_REGISTERS else 3


VARIANTS = (
    Variant(name="PyTorch, op by op", run=softmax_by_hand, passes=8, roundings=4),
    Variant(name="torch", run=softmax_torch, passes=2),
    Variant(name="torch.compile", run=softmax_compiled, passes=2, kind="compile"),
    Variant(name="Triton", run=softmax_triton, passes=_num_passes, kind="triton"),
)


def configurations() -> Iterator[Variant]:
    """What may be chosen otherwise, for rows of 16384 columns."""
    plans = [RowPlan(num_warps=warps) for warps in (8, 16, 32)]
    plans += [RowPlan(num_warps=8, registers=80), RowPlan(num_warps=16, registers=40)]  # three rows a multiprocessor
    plans.append(RowPlan(num_warps=32, load="evict_first"))
    plans += [RowPlan(num_warps=warps, programs=1, stages=3) for warps in (16, 32)]
    plans += [RowPlan(num_warps=warps, tile=4096) for warps in (8, 16)]
    for plan in plans:
        passes = 2 if plan.tile is None else 3
        yield Variant(name=f"Triton: {plan}", run=partial(softmax_triton, plan=plan), passes=passes, kind="triton")


if __name__ == "__main__":
    raise SystemExit(show("softmax"))
