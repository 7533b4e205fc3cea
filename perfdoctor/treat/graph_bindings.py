"""What parameters and buffers are bound to, looked at line by line: another tensor in `.grad`, other memory.

A graph goes on with the addresses of graph capture.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any

import torch

Line = tuple[CodeType, int]


class Bindings:
    """What `tensors` were bound to when last looked at, and the lines that bound something else."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.rebound: dict[Line, None] = {}  # lines that put another gradient in the place of one
        self.created: dict[Line, None] = {}  # lines after which there is a gradient where there was none
        self.dropped = False  # whether a gradient went
        self.moved: dict[Line, torch.Tensor] = {}  # lines that gave a tensor other memory
        strided = [t for t in tensors if _has_memory(t)]
        self._leaves = [t for t in strided if t.is_leaf and t.requires_grad]
        self._tensors = strided
        self._grads: list[Any] = []
        self._addresses: list[int] = []

    def begin(self) -> None:
        """Take what holds now as what is known."""
        self._grads = [t.grad for t in self._leaves]
        self._addresses = [t.data_ptr() for t in self._tensors]

    def end(self) -> None:
        """Let go of the gradients: each call of a step may have made its own."""
        self._grads = []

    def look(self, line: Line | None) -> None:
        """Note what differs since the last look as the work of `line`."""
        grads = [t.grad for t in self._leaves]
        for before, now in zip(self._grads, grads, strict=True):
            if now is before or line is None:
                continue
            self.dropped |= now is None
            if now is not None:
                (self.created if before is None else self.rebound)[line] = None
        self._grads = grads
        addresses = [t.data_ptr() for t in self._tensors]
        if addresses != self._addresses and line is not None:
            moved = zip(self._tensors, self._addresses, addresses, strict=True)
            self.moved.setdefault(line, next(t for t, before, now in moved if before != now))
        self._addresses = addresses


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it lies at one address of its own; wrappers of other tensors and sparse ones do not."""
    try:
        return tensor.layout is torch.strided and tensor.data_ptr() >= 0
    except (RuntimeError, NotImplementedError):
        return False


def gradient_lines(found: Sequence[Bindings], set_by_name: Iterable[Line], clearing: Iterable[Line]) -> list[Line]:
    """The lines that bind a gradient by hand.

    `set_by_name`: those that call `setattr`; `clearing`: those that call zero_grad, in which backward() may follow.
    """
    changed = {line: None for one in found for line in (*one.rebound, *one.created)}
    # A gradient where there was none is most often backward()'s own.
    plain = {line for one in found for line in one.rebound} - set(clearing)
    by_hand = plain | {*_stores(set(changed)), *set_by_name}
    return [line for line in changed if line in by_hand]


def _stores(lines: set[Line]) -> list[Line]:
    """Of these lines, those that assign to a `.grad`."""
    found: dict[Line, None] = {}
    for code in dict.fromkeys(code for code, _ in lines):
        current = code.co_firstlineno
        for instruction in dis.get_instructions(code):
            if isinstance(instruction.starts_line, int) and not isinstance(instruction.starts_line, bool):
                current = instruction.starts_line
            line: int = getattr(instruction, "line_number", None) or current
            if instruction.opname == "STORE_ATTR" and instruction.argval == "grad":
                found[code, line] = None
    return [line for line in found if line in lines]
