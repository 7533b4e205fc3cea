"""Lines of the user's source that write an optimizer's learning rate: `group["lr"] = ...`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from perfdoctor.record.capture import Site
from perfdoctor.treat.graph_sources import Function, NameSpace, functions, site, syntax_tree

_MOST_CALLS = 4  # functions called by functions called ... by the loop
_absent = object()


def rate_writes(optimizers: Sequence[Any], spaces: list[NameSpace]) -> list[Site]:
    """Lines that write `["lr"]` of a param group of these optimizers, as far as names tell.

    Looked at: code where the step and its callers stand, and the functions of these files that are called from there.
    """
    found: dict[tuple[str, int], Site] = {}
    for file in dict.fromkeys(space.file for space in spaces):
        here = [space for space in spaces if space.file == file]
        seen = _seen(file, here)
        for line, holder in _writes(file):
            owner = _innermost(file, line)
            if owner in seen and _fits(holder, line, owner, optimizers, here):
                found[file, line] = site(file, line)
    return list(found.values())


def _seen(file: str, spaces: list[NameSpace]) -> set[Function | None]:
    """The functions whose code runs around the step; None stands for the module's own lines."""
    seen: set[Function | None] = {None}
    seen.update(f for f in functions(file) if any(_is_space(f, space) for space in spaces))
    for _ in range(_MOST_CALLS):
        called = _called_names(file, seen)
        more = {f for f in functions(file) if f.name in called} - seen
        if not more:
            break
        seen |= more
    return seen


def _is_space(function: Function, space: NameSpace) -> bool:
    return (function.first, function.last) == (space.first, space.last)


def _called_names(file: str, seen: set[Function | None]) -> set[str]:
    names = set()
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, ast.Call) and _innermost(file, node.lineno) in seen:
            names.add(node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", ""))
    return names


def _innermost(file: str, line: int) -> Function | None:
    around = [f for f in functions(file) if f.first <= line <= f.last]
    return max(around, key=lambda f: f.first, default=None)


def _writes(file: str) -> Iterator[tuple[int, ast.expr]]:
    """(line, what is subscripted) of every `... ["lr"] = `."""
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        for target in targets:
            key = target.slice if isinstance(target, ast.Subscript) else None
            if isinstance(target, ast.Subscript) and isinstance(key, ast.Constant) and key.value == "lr":
                yield target.lineno, target.value


def _fits(
    holder: ast.expr, line: int, owner: Function | None, optimizers: Sequence[Any], spaces: list[NameSpace]
) -> bool:
    """Whether the dict that is written is a param group, and of one of these optimizers as far as its name is known."""
    names = _group_owners(holder)
    if not names and isinstance(holder, ast.Name):
        names = _bound_to_groups(spaces[0].file, holder.id, owner)
    for name in names:
        held = next((s.names[name] for s in spaces if name in s.names and s.shows(name, line)), _absent)
        if held is _absent or any(held is optimizer for optimizer in optimizers):
            return True
    return False


def _group_owners(node: ast.AST) -> list[str]:
    """The names before `.param_groups` in an expression; "" for what is no plain name."""
    groups = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr == "param_groups"]
    return [group.value.id if isinstance(group.value, ast.Name) else "" for group in groups]


def _bound_to_groups(file: str, name: str, owner: Function | None) -> list[str]:
    """The owners of the param groups that a function binds to `name`: by `for name in o.param_groups`, or `=`."""
    owners = []
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, ast.For | ast.comprehension):
            target, value = node.target, node.iter
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        else:
            continue
        if _innermost(file, target.lineno) == owner and name in _stored(target):
            owners += _group_owners(value)
    return owners


def _stored(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
