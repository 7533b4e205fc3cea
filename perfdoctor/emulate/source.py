"""What the user's line says, where the op alone does not tell: a subscript, a tensor made in the same expression."""

from __future__ import annotations

import ast
from types import FrameType
from typing import Any

import torch

from perfdoctor.record.call_site import user_frame
from perfdoctor.record.instruction import call_name, current_instruction

_CREATIONS = frozenset((
    "tensor", "as_tensor", "asarray", "zeros", "ones", "full", "arange", "linspace", "logspace", "eye", "rand",
    "randn", "randint", "randperm", "empty", "scalar_tensor", "Tensor", "FloatTensor", "DoubleTensor", "HalfTensor",
    "LongTensor", "IntTensor", "BoolTensor", "new_tensor", "new_zeros", "new_ones", "new_full", "zeros_like",
    "ones_like", "full_like", "rand_like", "randn_like", "tril_indices", "triu_indices",
))  # fmt: skip


def subscript(frame: FrameType | None) -> ast.Subscript | None:
    """The subscript that the user's line is executing, None where it does something else."""
    line = user_frame(frame)
    node = current_instruction(line).node if line is not None else None
    return node if isinstance(node, ast.Subscript) else None


def formats(frame: FrameType | None) -> bool:
    """Whether the user's line is filling in a text: `"%.3f" % loss`."""
    line = user_frame(frame)
    node = current_instruction(line).node if line is not None else None
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mod)
        and isinstance(node.left, ast.Constant | ast.JoinedStr)
    )


def indexes(frame: FrameType | None) -> bool:
    """Whether the user's line is executing a subscript; known without its source too."""
    line = user_frame(frame)
    opname = current_instruction(line).opname if line is not None else ""
    return "SUBSCR" in opname or "SLICE" in opname or subscript(frame) is not None


def indexes_with_tensor(frame: FrameType | None) -> bool:
    """Whether the line indexes with a host tensor that it holds under a name, or a part of it: no list, no new one."""
    node, line = subscript(frame), user_frame(frame)
    if node is None or line is None:
        return False
    elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    names = [element.value if isinstance(element, ast.Subscript) else element for element in elements]
    values = [_named_value(element.id, line) for element in names if isinstance(element, ast.Name)]
    return any(type(value) is torch.Tensor for value in values)


def makes_source(frame: FrameType) -> bool | None:
    """Whether the receiver of the method that `frame` is calling is made in the same expression by a tensor factory:
    True for `torch.tensor(v).float().to(d)`, False for `batch.to(d)`; None where the source is not to be had."""
    node: Any = current_instruction(frame).node
    if not isinstance(node, ast.Call):
        return None
    while isinstance(node, ast.Call):
        if call_name(node.func) in _CREATIONS:
            return True
        node = node.func.value if isinstance(node.func, ast.Attribute) else None
    return False


def _named_value(name: str, frame: FrameType) -> Any:
    return frame.f_locals.get(name, frame.f_globals.get(name))
