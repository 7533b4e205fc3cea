"""What the examples of this folder share: what a variant is, the CUDA C++ compiler, and the way to the rest.

An example is a module with these names:

- `TITLE`, `SHAPES`: its name in the table, and what it is timed on: label -> shape
- `ROOF`: "copy" or "read", the bandwidth that it is held to
- `make_inputs(shape, dtype, device)`: random tensors
- `reference(*inputs)`: the result in float64, from PyTorch
- `TOLERANCE`: dtype -> (relative, absolute) difference from the reference
- `num_pass_bytes(*inputs)`: what reading or writing one large tensor once moves
- `VARIANTS`: the ways to compute it
- `configurations()`: variants with other choices of block, warps and grid, for `--tune`
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parent
if str(FOLDER.parents[1]) not in sys.path:
    sys.path.append(str(FOLDER.parents[1]))  # perfdoctor, where it is not installed

ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""How the CUDA C++ sources number the element types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to compute what an example computes."""

    name: str
    run: Callable[..., Tensor]
    passes: int | Callable[..., int]
    """how often a large tensor is read or written once, as the code says; may depend on the inputs"""
    roundings: int = 1
    """how often what it works with is rounded to the tensors' type: once for a kernel, once an operation by hand"""
    kind: str = "torch"
    """"torch" runs anywhere; "compile" needs a compiler; "triton" a GPU or the interpreter; "cuda" a GPU and nvcc"""

    def moved_bytes(self, example: Any, inputs: tuple[Any, ...]) -> int:
        """What this variant moves between memory and the multiprocessors, caches left aside."""
        passes = self.passes if isinstance(self.passes, int) else self.passes(*inputs)
        return passes * int(example.num_pass_bytes(*inputs))


def error_of(example: Any, variant: Variant, inputs: tuple[Any, ...], found: Tensor) -> float:
    """The largest difference from the float64 reference, over what is allowed: 1 and less is right.

    Where the reference is not finite, the result must be the same infinity, or NaN for NaN; else the error is infinite.
    """
    exact = example.reference(*inputs)
    found = found.to(exact.device, torch.float64)
    dtype = next(tensor.dtype for tensor in _tensors(inputs))
    relative, absolute = example.TOLERANCE[dtype]
    if found.shape != exact.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    finite = exact.isfinite()
    if not torch.equal(found[~finite].nan_to_num(nan=7.0), exact[~finite].nan_to_num(nan=7.0)):
        return float("inf")
    exact, found = exact[finite], found[finite]
    if not exact.numel():
        return 0.0
    size = exact.abs()
    if variant.roundings > 1:  # what was rounded on the way may have been as large as the largest input
        largest = max(
            float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max()) for tensor in _tensors(inputs) if tensor.numel()
        )
        size = variant.roundings * size.clamp_min(largest)
    error = float(((found - exact).abs() / (relative * size + absolute).clamp_min(1e-300)).max())
    return error if error == error else float("inf")


def _tensors(inputs: tuple[Any, ...]) -> list[Tensor]:
    """The inputs, those in lists included."""
    nested = [item if isinstance(item, (list, tuple)) else [item] for item in inputs]
    return [tensor for tensors in nested for tensor in tensors if isinstance(tensor, Tensor)]


def can_run(variant: Variant, device: torch.device) -> bool:
    """Whether this variant runs on tensors of `device` here."""
    if variant.kind in ("compile", "cuda"):
        return device.type == "cuda"
    return variant.kind == "torch" or device.type == "cuda" or is_interpreted()


def is_interpreted() -> bool:
    """Whether Triton was imported with TRITON_INTERPRET=1: kernels then run in Python, on CPU tensors."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def compiled(name: str) -> Any:
    """The extension module of `<name>.cu`, compiled on first use (some 10 s) and kept on disk by torch."""
    from perfdoctor.kernels.walker import load_extension

    major, minor = torch.cuda.get_device_capability()
    architecture = f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"
    return load_extension(f"perfdoctor_example_{name}", [str(FOLDER / f"{name}.cu")], ["-O3", architecture])


def stream_of(tensor: Tensor) -> int:
    """The address of the stream that work on this tensor goes to."""
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


def check_alike(*tensors: Tensor) -> None:
    """Raises ValueError unless all are contiguous, of one shape, one device and one of the three types."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype not in ELEMENTS:
            raise ValueError(f"dtype {tensor.dtype}: the kernel takes float32, float16 and bfloat16; convert it first")
        if not tensor.is_contiguous():
            raise ValueError(
                f"strides {tensor.stride()}: the kernel takes contiguous tensors; call .contiguous() first"
            )
        if (tensor.shape, tensor.dtype, tensor.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device} beside {tuple(first.shape)} {first.dtype} on "
                f"{first.device}: the kernel does not broadcast or convert; expand or convert first"
            )


def check_forward_only(*tensors: Tensor) -> None:
    """Raises ValueError where autograd would want a gradient: a kernel without backward would cut it off in silence."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "a tensor requires a gradient, and this kernel has no backward: call it under torch.no_grad(), or with "
            "tensor.detach() (layer_norm.py shows a kernel with its backward)"
        )


def show(example: str) -> int:
    """What `python examples/kernels/<example>.py` does: check every variant, then time it. Returns the exit code."""
    from table import main

    return int(main(["--only", example, *sys.argv[1:]]))
