"""GeLU in its tanh form: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).

Eight PyTorch operations or one kernel: the arithmetic is the same, the traffic is nine times as much.
`python examples/kernels/gelu.py`
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from tiling import LAUNCHES, Tiling, tilings
from torch import Tensor
from variants import ELEMENTS, Variant, check_alike, check_forward_only, compiled, show, stream_of

TITLE = "GeLU (tanh)"
ROOF = "copy"
SHAPES = {"16384 x 16384": (16384, 16384)}
# Against float64. float32: the exp is right to 2 ulp, plus half an ulp of its argument for each unit that the argument
# is large; results below 1e-7 are held to that absolutely. The two-byte types: the rounding of the result, half an ulp.
TOLERANCE = {torch.float32: (4e-6, 1e-7), torch.float16: (5e-4, 6e-8), torch.bfloat16: (3.95e-3, 1e-7)}

_TILING = Tiling()


def gelu_by_hand(x: Tensor) -> Tensor:
    """As one writes it down. Eight kernels: read 10 tensors, write 8 (the cube is one kernel, so is 1 + ...)."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_torch(x: Tensor) -> Tensor:
    """PyTorch's own: one kernel."""
    return F.gelu(x, approximate="tanh")


@functools.cache
def _compiled_by_hand() -> Callable[[Tensor], Tensor]:
    function: Callable[[Tensor], Tensor] = torch.compile(gelu_by_hand, dynamic=False)
    return function


def gelu_compiled(x: Tensor) -> Tensor:
    """The one by hand, fused by torch.compile."""
    return _compiled_by_hand()(x)


@triton.jit
def _gelu(x):
    """x / (1 + exp(-2 u)) is 0.5 x (1 + tanh(u)): one exp, one division, and no cancellation where tanh is near -1."""
    twice_u = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
    return x / (1.0 + tl.exp(-twice_u))


@triton.jit
def _gelu_kernel(x, out, num_elements, BLOCK: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr):
    """Each program takes every `num_programs`-th block; with as many programs as blocks that is one block each."""
    lanes = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, num_elements, tl.num_programs(0).to(tl.int64) * BLOCK):
        left = num_elements - start
        if left >= BLOCK:
            values = tl.load(x + start + lanes, eviction_policy=LOAD)
            result = _gelu(values.to(tl.float32))
            tl.store(out + start + lanes, result.to(out.dtype.element_ty), cache_modifier=STORE)
        else:
            values = tl.load(x + start + lanes, mask=lanes < left, other=0.0)
            result = _gelu(values.to(tl.float32))
            tl.store(out + start + lanes, result.to(out.dtype.element_ty), mask=lanes < left)


def gelu_triton(x: Tensor, tiling: Tiling = _TILING) -> Tensor:
    """GeLU of a contiguous tensor, without backward. Raises ValueError for others."""
    check_alike(x)
    check_forward_only(x)
    out = torch.empty_like(x)
    if x.numel():
        blocks = triton.cdiv(x.numel(), tiling.block)
        _gelu_kernel[tiling.grid(blocks, x.device)](
            x, out, x.numel(), BLOCK=tiling.block, LOAD=tiling.load, STORE=tiling.store,
            num_warps=tiling.num_warps,
        )  # fmt: skip
    return out


def gelu_cuda(x: Tensor, threads: int = 128, ahead: int = 1) -> Tensor:
    """The same by gelu.cu: a thread has `ahead` (1, 2, 4) 16-byte loads in flight; 256 with 4 are the Triton tile."""
    check_alike(x)
    check_forward_only(x)
    out = torch.empty_like(x)
    if x.numel():
        with torch.cuda.device(x.device):
            compiled("gelu").gelu(
                x.data_ptr(), out.data_ptr(), x.numel(), ELEMENTS[x.dtype], threads, ahead, stream_of(x)
            )
    return out


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor]:
    """x, of a spread that reaches where tanh is flat."""
    return (3 * torch.randn(shape, dtype=dtype, device=device),)


def reference(x: Tensor) -> Tensor:
    """In float64."""
    return F.gelu(x.double(), approximate="tanh")


def num_pass_bytes(x: Tensor) -> int:
    """One read or write of a tensor like x."""
    return x.numel() * x.element_size()


VARIANTS = (
    Variant(name="PyTorch, op by op", run=gelu_by_hand, passes=18, roundings=8),
    Variant(name="torch", run=gelu_torch, passes=2, roundings=2),  # 1 + tanh cancels where tanh is near -1
    Variant(name="torch.compile", run=gelu_compiled, passes=2, roundings=8, kind="compile"),
    Variant(name="Triton", run=gelu_triton, passes=2, kind="triton"),
    Variant(name="CUDA C++", run=gelu_cuda, passes=2, kind="cuda"),
)


def configurations() -> Iterator[Variant]:
    """What may be chosen otherwise."""
    for tiling in tilings():
        yield Variant(name=f"Triton: {tiling}", run=partial(gelu_triton, tiling=tiling), passes=2, kind="triton")
    for threads, ahead in LAUNCHES:
        run = partial(gelu_cuda, threads=threads, ahead=ahead)
        yield Variant(name=f"CUDA C++: {threads} threads, {ahead} ahead", run=run, passes=2, kind="cuda")


if __name__ == "__main__":
    raise SystemExit(show("gelu"))
