"""What the code around a step changes between two calls: attributes, items, gradients. Found in its source.

Looked at: loops of the functions (or the module) that call the step, and the functions that are called from there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from perfdoctor.record.capture import Site
from perfdoctor.treat.graph_python_state import attribute_names
from perfdoctor.treat.graph_sources import (
    NameSpace,
    assigned,
    innermost,
    is_space,
    reached_functions,
    site,
    syntax_tree,
)

_unknown = object()
_NUMBERS = (bool, int, float)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The source around a step: its name spaces, and the functions that ran in the step itself, which are left out."""

    spaces: list[NameSpace]
    codes: frozenset[CodeType]

    def nodes(self) -> Iterator[tuple[ast.AST, str, list[NameSpace]]]:
        """Statements and expressions that run again and again outside the step, with their file and its names."""
        for file in dict.fromkeys(space.file for space in self.spaces):
            here = [space for space in self.spaces if space.file == file]
            seen = reached_functions(file, here)
            loops = _loop_lines(file)
            for node in ast.walk(syntax_tree(file)):
                line = getattr(node, "lineno", None)
                if line is None or self._ran(file, line):
                    continue
                owner = innermost(file, line)
                helper = owner is not None and not any(is_space(owner, space) for space in here)
                if owner in seen and (helper or line in loops):
                    yield node, file, here

    def _ran(self, file: str, line: int) -> bool:
        return any(
            code.co_filename == file and line in {number for _, _, number in code.co_lines()} for code in self.codes
        )


def _loop_lines(file: str) -> set[int]:
    loops = (node for node in ast.walk(syntax_tree(file)) if isinstance(node, ast.For | ast.While))
    return {line for loop in loops for line in range(loop.lineno, (loop.end_lineno or loop.lineno) + 1)}


def state_writes(around: Surroundings, objects: list[Any]) -> list[tuple[str, Any, Site]]:
    """Attributes and items that are written there and that the step reads: (as written, what it holds, line).

    `objects`: what the step reaches.
    """
    reached = {id(each) for each in objects}
    read = frozenset(name for code in around.codes for name in attribute_names(code))
    found: dict[tuple[str, int], tuple[str, Any, Site]] = {}
    for node, file, here in around.nodes():
        for target in _targets(node):
            held = _written(target, here, reached, read)
            if held is not _unknown:
                found[file, target.lineno] = (ast.unparse(target), held, site(file, target.lineno))
    return list(found.values())


def _targets(node: ast.AST) -> list[ast.Attribute | ast.Subscript]:
    return [leaf for leaf in assigned(node) if isinstance(leaf, ast.Attribute | ast.Subscript)]


def _written(
    target: ast.Attribute | ast.Subscript, here: list[NameSpace], reached: set[int], read: frozenset[str]
) -> Any:
    """What is held where `target` writes, if the step reads that: a number, or a tensor that is bound anew."""
    owner = resolved(target.value, here)
    if owner is _unknown or id(owner) not in reached:
        return _unknown
    if isinstance(target, ast.Subscript):
        held = resolved(target, here)
        return held if isinstance(owner, dict | list) and type(held) in _NUMBERS else _unknown
    held = _attribute(owner, target.attr)
    if type(held) in _NUMBERS:
        library = isinstance(owner, torch.nn.Module) and type(owner).__module__.startswith("torch.")
        return held if target.attr in read or (library and target.attr != "training") else _unknown
    return held if isinstance(held, torch.Tensor) and target.attr in read else _unknown


def gradient_drops(around: Surroundings, owners: list[Any]) -> list[Site]:
    """Lines there that unbind the gradients of `owners` (optimizers, modules) or of a parameter of a loop over them."""
    found: dict[tuple[str, int], Site] = {}
    for node, file, here in around.nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "zero_grad":
            drops = not _is_false(node) and any(resolved(node.func.value, here) is each for each in owners)
        else:
            drops = isinstance(node, ast.Assign) and any(t.attr == "grad" for t in _targets(node) if hasattr(t, "attr"))
        if drops:
            line: int = node.lineno  # type: ignore[attr-defined]
            found[file, line] = site(file, line)
    return list(found.values())


def _is_false(call: ast.Call) -> bool:
    given = [k.value for k in call.keywords if k.arg == "set_to_none"] or call.args[:1]
    return bool(given) and isinstance(given[0], ast.Constant) and given[0].value is False


def resolved(node: ast.AST, here: list[NameSpace]) -> Any:
    """The object that a name, an attribute chain or a constant item stands for; no code of the user's is run."""
    if isinstance(node, ast.Name):
        spaces = (space for space in here if node.id in space.names and space.shows(node.id, node.lineno))
        return next((space.names[node.id] for space in spaces), _unknown)
    if isinstance(node, ast.Attribute):
        return _attribute(resolved(node.value, here), node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return _item(resolved(node.value, here), node.slice.value)
    return _unknown


def _attribute(owner: Any, name: str) -> Any:
    own = getattr(owner, "__dict__", {})
    for names in (own, own.get("_modules"), own.get("_parameters"), own.get("_buffers")):
        if isinstance(names, dict) and name in names:
            return names[name]
    return _unknown


def _item(owner: Any, key: Any) -> Any:
    if type(owner) in (dict, list, tuple):
        try:
            return owner[key]
        except (LookupError, TypeError):
            return _unknown
    if isinstance(owner, torch.nn.Sequential | torch.nn.ModuleList | torch.nn.ModuleDict):
        return owner._modules.get(str(key), _unknown)
    return _unknown
