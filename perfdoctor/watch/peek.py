"""The value of an expression, where it can be had without running any code."""

from __future__ import annotations

import ast
import sys
from types import FrameType, ModuleType
from typing import Any

UNKNOWN = object()
# Keys that no code is asked for: a device tensor's __index__ waits, inside the hook that a wait has called.
_KEYS = (int, str, bool, float, bytes, type(None))
_LEAVING = frozenset(("to", "cpu", "cuda", "numpy", "item", "tolist", "size", "dim", "numel", "type", "data_ptr"))


def peek(node: ast.AST, frame: FrameType) -> Any:
    """The value of constants, names, plain attributes and items of built-in containers; UNKNOWN for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return _lookup(node.id, frame)
    if isinstance(node, ast.Attribute):
        return _attribute(peek(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        return _item(peek(node.value, frame), peek(node.slice, frame))
    if isinstance(node, ast.Slice):
        bounds = [None if bound is None else peek(bound, frame) for bound in (node.lower, node.upper, node.step)]
        return UNKNOWN if any(bound is UNKNOWN for bound in bounds) else slice(*bounds)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = peek(node.operand, frame)
        return -value if type(value) in (int, float) else UNKNOWN
    return UNKNOWN


def peek_origin(node: ast.AST, frame: FrameType) -> Any:
    """The tensor that an expression starts from and stays with: `x` of `x.detach().mean()` and `x[:8]`; else UNKNOWN.

    A call that brings values to the host or makes other objects ends it.
    """
    value = peek(node, frame)
    while value is UNKNOWN:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr not in _LEAVING:
            node = node.func.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            return UNKNOWN
        value = peek(node, frame)
    return value if is_tensor(value) else UNKNOWN


def is_tensor(value: object) -> bool:
    """Whether a value is a torch.Tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _lookup(name: str, frame: FrameType) -> Any:
    found = frame.f_locals.get(name, UNKNOWN)
    return frame.f_globals.get(name, UNKNOWN) if found is UNKNOWN else found


def _attribute(value: Any, name: str) -> Any:
    if value is UNKNOWN:
        return UNKNOWN
    if isinstance(value, ModuleType):
        return vars(value).get(name, UNKNOWN)
    if is_tensor(value):
        return value.device if name == "device" else UNKNOWN
    namespace = getattr(value, "__dict__", None)
    if not isinstance(namespace, dict):
        return UNKNOWN
    for names in (namespace, namespace.get("_parameters"), namespace.get("_buffers"), namespace.get("_modules")):
        if isinstance(names, dict) and name in names:
            return names[name]
    return UNKNOWN


def _parts(key: Any) -> tuple[Any, ...]:
    return (key.start, key.stop, key.step) if isinstance(key, slice) else (key,)


def _item(container: Any, key: Any) -> Any:
    if type(container) not in (dict, list, tuple) or not all(type(part) in _KEYS for part in _parts(key)):
        return UNKNOWN
    try:
        return container[key]
    except (KeyError, IndexError, TypeError):
        return UNKNOWN
