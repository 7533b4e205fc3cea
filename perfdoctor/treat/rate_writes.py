"""Lines of the user's source that write a number of an optimizer's param groups: `group["lr"] = ...`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from perfdoctor.record.capture import Site
from perfdoctor.treat.graph_sources import (
    Function,
    NameSpace,
    assigned,
    innermost,
    reached_functions,
    site,
    syntax_tree,
)

_absent = object()


def rate_writes(optimizers: Sequence[Any], spaces: list[NameSpace]) -> list[tuple[Site, str]]:
    """Lines that write a number of a param group of these optimizers, as far as names tell, and which number.

    Looked at: code where the step and its callers stand, and the functions of these files that are called from there.
    """
    numbers = {
        name
        for opt in optimizers
        for group in opt.param_groups
        for name, value in group.items()
        if _number(name, value)
    }
    found: dict[tuple[str, int, str], Site] = {}
    for file in dict.fromkeys(space.file for space in spaces):
        here = [space for space in spaces if space.file == file]
        seen = reached_functions(file, here)
        for line, name, holder in _writes(file):
            owner = innermost(file, line)
            if name in numbers and owner in seen and _fits(holder, line, owner, optimizers, here):
                found[file, line, name] = site(file, line)
    return [(where, name) for (_, _, name), where in found.items()]


def _number(name: str, value: Any) -> bool:
    return name == "lr" or (
        type(value) in (bool, int, float, tuple) and not name.startswith(("initial_", "max_", "min_"))
    )


def _writes(file: str) -> Iterator[tuple[int, str, ast.expr]]:
    """(line, key, the dict that is written) of every `... ["lr"] = `, `....update(lr=...)` and their like."""
    for node in ast.walk(syntax_tree(file)):
        for target in assigned(node):
            key = target.slice if isinstance(target, ast.Subscript) else None
            if isinstance(target, ast.Subscript) and isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield target.lineno, key.value, target.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
            yield from ((node.lineno, name, node.func.value) for name in _updated(node))


def _updated(call: ast.Call) -> Iterator[str]:
    yield from (keyword.arg for keyword in call.keywords if keyword.arg is not None)
    for given in call.args:
        if isinstance(given, ast.Dict):
            yield from (k.value for k in given.keys if isinstance(k, ast.Constant) and isinstance(k.value, str))


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
        if innermost(file, target.lineno) == owner and name in _stored(target):
            owners += _group_owners(value)
    return owners


def _stored(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
