"""out = x + y: the plainest kernel there is, and the one that shows what memory gives.

One addition for every 12 bytes (float32): nothing here can be slow but the memory.
`python examples/kernels/vector_add.py`
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from tiling import LAUNCHES, Tiling, tilings
from torch import Tensor
from variants import ELEMENTS, Variant, check_alike, check_forward_only, compiled, show, stream_of

TITLE = "vector add"
ROOF = "copy"
SHAPES = {"16384 x 16384": (16384, 16384)}
# One rounding to the type: half a unit in the last place.
TOLERANCE = {torch.float32: (6e-8, 0.0), torch.float16: (4.9e-4, 3e-8), torch.bfloat16: (3.91e-3, 0.0)}


_TILING = Tiling()


@triton.jit
def _add_kernel(x, y, out, num_elements, BLOCK: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr):
    """Each program takes every `num_programs`-th block; with as many programs as blocks that is one block each."""
    lanes = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * BLOCK  # 64 bits: there may be 2^31 elements and more
    for start in range(first, num_elements, tl.num_programs(0).to(tl.int64) * BLOCK):
        left = num_elements - start
        if left >= BLOCK:
            # No mask: with one, a length that is no multiple of four would make every load a 4-byte load.
            a = tl.load(x + start + lanes, eviction_policy=LOAD)
            b = tl.load(y + start + lanes, eviction_policy=LOAD)
            total = a.to(tl.float32) + b.to(tl.float32)
            tl.store(out + start + lanes, total.to(out.dtype.element_ty), cache_modifier=STORE)
        else:
            a = tl.load(x + start + lanes, mask=lanes < left)
            b = tl.load(y + start + lanes, mask=lanes < left)
            total = a.to(tl.float32) + b.to(tl.float32)
            tl.store(out + start + lanes, total.to(out.dtype.element_ty), mask=lanes < left)


def add_triton(x: Tensor, y: Tensor, tiling: Tiling = _TILING) -> Tensor:
    """x + y of contiguous tensors of one shape and dtype, without backward. Raises ValueError for others."""
    check_alike(x, y)
    check_forward_only(x, y)
    out = torch.empty_like(x)
    if x.numel():
        blocks = triton.cdiv(x.numel(), tiling.block)
        _add_kernel[tiling.grid(blocks, x.device)](
            x, y, out, x.numel(), BLOCK=tiling.block, LOAD=tiling.load, STORE=tiling.store,
            num_warps=tiling.num_warps,
        )  # fmt: skip
    return out


def add_cuda(x: Tensor, y: Tensor, threads: int = 256, ahead: int = 1) -> Tensor:
    """The same by vector_add.cu: a thread has `ahead` (1, 2, 4) 16-byte loads of each input in flight.

    256 threads with 4 are what Triton makes of 4096 float32 elements and 8 warps.
    """
    check_alike(x, y)
    check_forward_only(x, y)
    out = torch.empty_like(x)
    if x.numel():
        with torch.cuda.device(x.device):
            compiled("vector_add").add(
                x.data_ptr(), y.data_ptr(), out.data_ptr(), x.numel(), ELEMENTS[x.dtype], threads, ahead, stream_of(x)
            )
    return out


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """x and y."""
    return torch.randn(shape, dtype=dtype, device=device), torch.randn(shape, dtype=dtype, device=device)


def reference(x: Tensor, y: Tensor) -> Tensor:
    """In float64."""
    return x.double() + y.double()


def num_pass_bytes(x: Tensor, _: Tensor) -> int:
    """One read or write of one of the three tensors."""
    return x.numel() * x.element_size()


VARIANTS = (
    Variant(name="torch", run=torch.add, passes=3),
    Variant(name="Triton", run=add_triton, passes=3, kind="triton"),
    Variant(name="CUDA C++", run=add_cuda, passes=3, kind="cuda"),
)


def configurations() -> Iterator[Variant]:
    """What may be chosen otherwise."""
    for tiling in tilings():
        yield Variant(name=f"Triton: {tiling}", run=partial(add_triton, tiling=tiling), passes=3, kind="triton")
    for threads, ahead in LAUNCHES:
        run = partial(add_cuda, threads=threads, ahead=ahead)
        yield Variant(name=f"CUDA C++: {threads} threads, {ahead} ahead", run=run, passes=3, kind="cuda")


if __name__ == "__main__":
    raise SystemExit(show("vector_add"))
