"""The sum of every tensor in a list: from a Python loop to one kernel, one block a tensor.

The loop launches one kernel a tensor, and the host takes longer to launch each than the GPU to run it. One launch that
finds its tensors in a table ends that. `perfdoctor.grad_stats` is this kernel grown up.
`python examples/kernels/tensor_sums.py`
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from variants import ELEMENTS, Variant, compiled, show, stream_of

TITLE = "sums of many tensors"
ROOF = "read"
# Against float64, of values of one sign. float32: PyTorch adds in a tree of float32, the kernel in float64.
TOLERANCE = {torch.float32: (3e-6, 1e-6), torch.float16: (5e-4, 1e-4), torch.bfloat16: (3.95e-3, 1e-4)}


def _gpt2_sizes() -> tuple[int, ...]:
    from perfdoctor.bench.gradient_sets import transformer

    return tuple(math.prod(shape) for shape in transformer(768, 12))


SHAPES = {"1000 x 1024": (1024,) * 1000, "GPT-2 124M, 148 tensors": _gpt2_sizes()}
"""Here a shape is the sizes of the tensors."""


def make_table(tensors: Sequence[Tensor]) -> Tensor:
    """Where the tensors lie, int64 [n, 2] on their device: address, number of elements.

    Raises ValueError for no tensors, and for tensors that are not contiguous or not alike. The copy to the device waits
    for it: a table that is made for every call costs more than the kernel.
    """
    if not tensors:
        raise ValueError("no tensors: a table needs one at least")
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype not in ELEMENTS or (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"{tensor.dtype} on {tensor.device} beside {first.dtype} on {first.device}: the kernel takes tensors "
                "of one type out of float32, float16, bfloat16 on one device; call it once for each"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"strides {tensor.stride()}: the kernel takes contiguous tensors; call .contiguous()")
    return torch.tensor([(tensor.data_ptr(), tensor.numel()) for tensor in tensors]).to(first.device)


def sums_cuda(tensors: Sequence[Tensor], table: Tensor | None = None, threads: int = 256) -> Tensor:
    """The sums, float32 [n], in one launch. `table` is what `make_table` gave for these tensors where they lie now."""
    if not tensors:
        return torch.empty(0)
    table = make_table(tensors) if table is None else table
    if table.shape != (len(tensors), 2) or table.device != tensors[0].device:
        raise ValueError(
            f"a table {tuple(table.shape)} on {table.device} for {len(tensors)} tensors on {tensors[0].device}: make "
            "one for these with make_table"
        )
    out = torch.empty(len(tensors), dtype=torch.float32, device=table.device)
    with torch.cuda.device(table.device):
        compiled("tensor_sums").sums(
            table.data_ptr(), out.data_ptr(), len(tensors), ELEMENTS[tensors[0].dtype], threads, stream_of(table)
        )
    return out


def sums_loop(tensors: Sequence[Tensor], _: Tensor | None = None) -> Tensor:
    """One kernel a tensor, then one that puts the sums together."""
    return torch.stack([tensor.sum() for tensor in tensors])


def sums_loop_item(tensors: Sequence[Tensor], _: Tensor | None = None) -> Tensor:
    """The loop as it is often written: the host waits for every sum."""
    return torch.tensor([tensor.sum().item() for tensor in tensors])


def sums_made_table(tensors: Sequence[Tensor], _: Tensor | None = None) -> Tensor:
    """One launch, with the table made anew for every call."""
    return sums_cuda(tensors)


def sums_grad_stats(tensors: Sequence[Tensor], _: Tensor | None = None) -> Tensor:
    """The finished form: sums, means, norms, maxima and non-finite counts in one read, at any size and balance."""
    import perfdoctor

    sums: Tensor = perfdoctor.grad_stats([(str(index), tensor) for index, tensor in enumerate(tensors)]).per_tensor.sum
    return sums


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Tensor | None]:
    """One tensor for every size in `shape`, and their table where there is a GPU."""
    tensors = [torch.rand(size, dtype=dtype, device=device) for size in shape]
    return tensors, make_table(tensors) if device.type == "cuda" else None


def reference(tensors: Sequence[Tensor], _: Tensor | None = None) -> Tensor:
    """In float64."""
    return torch.stack([tensor.double().sum() for tensor in tensors])


def num_pass_bytes(tensors: Sequence[Tensor], _: Tensor | None = None) -> int:
    """One read of all."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


VARIANTS = (
    Variant(name="Python loop + item", run=sums_loop_item, passes=1),
    Variant(name="Python loop", run=sums_loop, passes=1),
    Variant(name="CUDA C++, table made", run=sums_made_table, passes=1, kind="cuda"),
    Variant(name="CUDA C++, table kept", run=sums_cuda, passes=1, kind="cuda"),
    Variant(name="perfdoctor.grad_stats", run=sums_grad_stats, passes=1),
)


def configurations() -> Iterator[Variant]:
    """What may be chosen otherwise."""
    for threads in (128, 256, 512, 1024):
        run = partial(sums_cuda, threads=threads)
        yield Variant(name=f"CUDA C++: {threads} threads", run=run, passes=1, kind="cuda")


if __name__ == "__main__":
    raise SystemExit(show("tensor_sums"))
