"""Compile and launch one Triton kernel, and look at what it wrote."""

import sys

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _double(source, target, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, 2 * tl.load(source + at, mask=at < n), mask=at < n)


if not torch.cuda.is_available():
    print(f"triton {triton.__version__}; no GPU to launch on")
    sys.exit(77)
source = torch.arange(1000, device="cuda", dtype=torch.float32)
target = torch.zeros_like(source)
_double[(8,)](source, target, 1000, BLOCK=128)
if not torch.equal(target, 2 * source):
    sys.exit("the kernel ran, but its result is wrong")
print(f"triton {triton.__version__}: compiled, launched, result right")
