"""The compiled walk over `.grad` pointers (walker.cpp), and the same in Python where nothing can be compiled.

A *row* is what a kernel must know of one gradient: address, number of elements, and a code made of its element type
(0 float32, 1 float16, 2 bfloat16), 256 where it is a parameter's `.grad`, and (device index + 1) << 32; the CPU counts
as device -1, no gradient has the code -1.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
from torch import Tensor, nn

from perfdoctor.kernels.extension import load_extension

ELEMENT_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
OF_PARAMETER = 256
NO_GRADIENT = -1

_log = logging.getLogger("perfdoctor")


@functools.cache
def compiled_walker() -> Any | None:
    """The extension module, compiled on first use (about 20 s, then kept on disk); None without a compiler.

    `PERFDOCTOR_NO_COMPILER=1` keeps it from being compiled.
    """
    if os.environ.get("PERFDOCTOR_NO_COMPILER") == "1":
        return None
    try:
        module = load_extension("perfdoctor_walker", ["walker.cpp"])
    except Exception as error:  # no compiler, no headers, no ninja, no disk: whatever it is, Python can do the walk
        _log.info("the gradient walk runs in Python, at about 0.3 us a parameter: %s", error)
        return None
    module.set_types(nn.Parameter, torch.Tensor)
    return module


def is_parameter(item: Tensor) -> bool:
    """Whether `item` stands for its `.grad`: a Parameter or a leaf that requires one. Else it is a gradient itself."""
    # The type first: isinstance of a Parameter runs Python code of torch's.
    return type(item) is nn.Parameter or (item.requires_grad and item.is_leaf) or isinstance(item, nn.Parameter)


def gradient_of(item: Tensor, always_grad: bool) -> Tensor | None:
    """The gradient that a list item stands for; with `always_grad` that is its `.grad`, whatever it is."""
    return item.grad if always_grad or is_parameter(item) else item


def is_simple(gradient: Tensor) -> bool:
    """Whether a kernel can read the gradient where it lies: a plain dense tensor of one of the three types."""
    return (
        type(gradient) in (Tensor, nn.Parameter)
        and gradient.layout == torch.strided
        and gradient.dtype in ELEMENT_CODES
        and gradient.device.type in ("cuda", "cpu")
        and not gradient.is_neg()
        and not gradient._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(gradient)  # it has no memory of its own
        and is_dense(gradient)
    )


def is_freed(gradient: Tensor) -> bool:
    """Whether a plain tensor's storage was resized to nothing, so that there is nothing to read.

    The address of a view into it is then its offset alone.
    """
    return gradient.data_ptr() == gradient.storage_offset() * gradient.itemsize and gradient.numel() > 0


def is_dense(gradient: Tensor) -> bool:
    """Whether the elements fill their memory without holes or overlaps, in whatever order."""
    if gradient.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(gradient.stride(), gradient.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def gather_rows(items: list[Tensor], always_grad: bool) -> Tensor | None:
    """The rows of all items, int64 [n, 3] on the CPU; None where a gradient is not simple."""
    walker = compiled_walker()
    if walker is not None:
        rows: Tensor | None = walker.gather(items, always_grad)
        return rows
    return gather_rows_in_python(items, always_grad)


def gather_rows_in_python(items: list[Tensor], always_grad: bool) -> Tensor | None:
    """`gather_rows` without the compiled walker."""
    rows = []
    for item in items:
        of_parameter = always_grad or is_parameter(item)
        gradient = item.grad if of_parameter else item
        if gradient is None:
            rows.append((0, 0, NO_GRADIENT))
            continue
        if type(item) not in (Tensor, nn.Parameter) or not is_simple(gradient):
            return None
        if is_freed(gradient):
            return None
        device = gradient.device.index if gradient.device.type == "cuda" else -1
        code = ELEMENT_CODES[gradient.dtype] | (OF_PARAMETER if of_parameter else 0) | ((device + 1) << 32)
        rows.append((gradient.data_ptr() if gradient.numel() else 0, gradient.numel(), code))
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)


class PythonWalk:
    """The compiled `Walk` in Python: compares what `gather_rows` found with what is there now.

    Both sides are read on every call: there is no stale answer.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def matches(self, items: list[Tensor], always_grad: bool) -> bool:
        """Whether every gradient of these items still lies where the rows say."""
        found = gather_rows_in_python(items, always_grad)
        return found is not None and torch.equal(found, self._rows)

    def matches_pairs(self, pairs: list[tuple[str, Tensor]], names: tuple[str, ...]) -> bool:
        """The same for (name, item) pairs, and whether the names are these."""
        if not all(type(pair) is tuple and len(pair) == 2 and isinstance(pair[1], Tensor) for pair in pairs):
            return False
        return tuple(name for name, _ in pairs) == names and self.matches([item for _, item in pairs], False)


def walk_of(rows: Tensor) -> Any:
    """A `Walk` over these rows, compiled where it can be."""
    walker = compiled_walker()
    return PythonWalk(rows) if walker is None else walker.Walk(rows)


def bump_versions(items: list[Tensor]) -> None:
    """Tells autograd that the `.grad` of these items were written in place."""
    walker = compiled_walker()
    if walker is not None:
        walker.bump_versions(items)
        return
    for item in items:
        gradient = item.grad
        if gradient is not None and not gradient.is_inference():
            torch.autograd.graph.increment_version(gradient)
