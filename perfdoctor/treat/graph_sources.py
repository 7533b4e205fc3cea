"""Lines of the user's source that made an object or will change it: where it was built, `scheduler.step()`.

An object does not know where it was made. Its class and the names it is bound to do, with the source.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from perfdoctor.record.capture import Frame, Site
from perfdoctor.record.owners import USER, file_owner, shown_file
from perfdoctor.record.syntax import tree_of

_MOST_CALLS = 4  # functions called by functions called ... by the loop


@dataclass(frozen=True, slots=True)
class NameSpace:
    """Names of one file: of a module, a function's closure, or a running function, with the lines where they hold."""

    file: str
    names: dict[str, Any]
    first: int = 0
    last: int = sys.maxsize

    def shows(self, name: str | None, line: int) -> bool:
        """Whether `name` on that line is one of these names, and not a function's own of the same spelling."""
        if name is None or not self.first <= line <= self.last:
            return False
        inner = [f for f in functions(self.file) if f.first <= line <= f.last and f.inside(self.first, self.last)]
        return not any(name in f.own for f in inner)


@dataclass(frozen=True, slots=True)
class Function:
    """A function's lines, with its name."""

    name: str
    first: int
    last: int
    own: frozenset[str]  # names that it binds itself

    def inside(self, first: int, last: int) -> bool:
        return first <= self.first and self.last <= last and (first, last) != (self.first, self.last)


def name_spaces(function: Callable[..., Any]) -> list[NameSpace]:
    """Those that the function and its callers see, innermost first; the user's only."""
    found: list[NameSpace] = []
    inner: Any = getattr(function, "__func__", getattr(function, "func", function))
    code = getattr(inner, "__code__", None)
    if code is not None and file_owner(code.co_filename) == USER:
        closure = {
            n: c.cell_contents for n, c in zip(code.co_freevars, inner.__closure__ or (), strict=True) if _bound(c)
        }
        outer = _enclosing(code.co_filename, code.co_firstlineno)
        found.append(NameSpace(code.co_filename, closure, outer.first, outer.last))
        found.append(NameSpace(code.co_filename, inner.__globals__))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if file_owner(frame.f_code.co_filename) == USER:
            file = frame.f_code.co_filename
            if frame.f_locals is not frame.f_globals:
                own = _function_at(file, frame.f_code.co_firstlineno)
                found.append(NameSpace(file, dict(frame.f_locals), own.first, own.last))
            found.append(NameSpace(file, frame.f_globals))
        frame = frame.f_back
    return found


def instances(spaces: list[NameSpace], kind: type) -> list[Any]:
    """The objects of a type that are bound to names there."""
    found = {id(v): v for space in spaces for v in list(space.names.values()) if issubclass(type(v), kind)}
    return list(found.values())


def construction(value: Any, spaces: list[NameSpace]) -> Site | None:
    """The line that built `value`: `name = Class(...)`, or the only call of its class."""
    wanted = type(value).__name__
    lines: dict[tuple[str, int], None] = {}
    for space in spaces:
        names = names_of(value, space)
        calls = list(_constructions(space.file, wanted))
        bound = [line for line, target in calls if target in names and space.shows(target, line)]
        if bound:
            return site(space.file, bound[-1])
        lines.update({(space.file, line): None for line, target in calls if target is None or not names})
    return site(*next(iter(lines))) if len(lines) == 1 else None


def step_calls(value: Any, spaces: list[NameSpace]) -> list[Site]:
    """Lines with `name.step(...)` for a name that `value` is bound to."""
    found: dict[tuple[str, int], None] = {}
    for space in spaces:
        for name in names_of(value, space):
            lines = _method_calls(space.file, name, "step")
            found.update({(space.file, line): None for line in lines if space.shows(name, line)})
    return [site(*key) for key in found]


def loop_changes(names: set[str], spaces: list[NameSpace]) -> list[tuple[str, Site]]:
    """Names that hold a number and are bound anew in a loop: (name, line), the last line for each name."""
    found: dict[str, Site] = {}
    for space in spaces:
        numbers = {name for name in names if type(space.names.get(name)) in (int, float)} - found.keys()
        for loop in (node for node in ast.walk(syntax_tree(space.file)) if isinstance(node, ast.For | ast.While)):
            for line, name in _bindings(loop):
                if name in numbers and space.shows(name, line):
                    found[name] = site(space.file, line)
    return list(found.items())


def _bindings(loop: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(loop):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def assignment(value: Any, spaces: list[NameSpace]) -> Site | None:
    """The last line that assigns a name that `value` is bound to, itself or as an item of a tuple."""
    for space in spaces:
        names = names_of(value, space)
        every = _assignments(space.file)
        lines = [line for line, target in every if target in names and space.shows(target, line)]
        if lines:
            return site(space.file, lines[-1])
    return None


def names_of(value: Any, space: NameSpace) -> set[str]:
    """The names there that are bound to `value`."""
    return {name for name, held in list(space.names.items()) if held is value}


def _constructions(file: str, wanted: str) -> Iterator[tuple[int, str | None]]:
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            if _called(node.value) == wanted:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from ((node.lineno, _last_name(target)) for target in targets)
        elif isinstance(node, ast.Call) and _called(node) == wanted:
            yield node.lineno, None


def _assignments(file: str) -> list[tuple[int, str | None]]:
    found = []
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                found += [(node.lineno, _last_name(part)) for part in parts]
        elif isinstance(node, ast.For):
            found += [(node.lineno, leaf.id) for leaf in ast.walk(node.target) if isinstance(leaf, ast.Name)]
    return sorted(found, key=lambda row: row[0])


def _method_calls(file: str, name: str, method: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(syntax_tree(file))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
        and _last_name(node.func.value) == name
    ]


def _called(call: ast.Call) -> str | None:
    return _last_name(call.func)


def _last_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def assigned(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to, the items of a tuple each; nothing for one that is no assignment."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    else:
        return []
    return [leaf for each in targets for leaf in (each.elts if isinstance(each, ast.Tuple | ast.List) else [each])]


@functools.lru_cache(maxsize=64)
def syntax_tree(file: str) -> ast.Module:
    """The file's source; empty where it cannot be read."""
    return tree_of(file) or ast.Module(body=[], type_ignores=[])


@functools.lru_cache(maxsize=64)
def functions(file: str) -> tuple[Function, ...]:
    """The functions of a file, outer ones first."""
    found = []
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments += [extra for extra in (node.args.vararg, node.args.kwarg) if extra is not None]
            inner = list(ast.walk(node))
            stored = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            shared = {name for n in inner if isinstance(n, ast.Global | ast.Nonlocal) for name in n.names}
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(d.lineno for d in decorators)])
            own = frozenset((stored | {a.arg for a in arguments}) - shared)
            found.append(Function(getattr(node, "name", ""), first, node.end_lineno or node.lineno, own))
    return tuple(found)


_WHOLE = Function("", 0, sys.maxsize, frozenset())


def _function_at(file: str, first: int) -> Function:
    return next((f for f in functions(file) if f.first == first), _WHOLE)


def _enclosing(file: str, line: int) -> Function:
    """The innermost function around the one that begins on `line`."""
    around = [f for f in functions(file) if f.first < line <= f.last]
    return max(around, key=lambda f: f.first, default=_WHOLE)


def innermost(file: str, line: int) -> Function | None:
    """The innermost function that a line stands in; None for the module's own lines."""
    around = [f for f in functions(file) if f.first <= line <= f.last]
    return max(around, key=lambda f: f.first, default=None)


def is_space(function: Function, space: NameSpace) -> bool:
    """Whether the name space is that function's own."""
    return (function.first, function.last) == (space.first, space.last)


def reached_functions(file: str, spaces: list[NameSpace]) -> set[Function | None]:
    """The functions whose code runs around the step, by name; None stands for the module's own lines."""
    seen: set[Function | None] = {None}
    seen.update(f for f in functions(file) if any(is_space(f, space) for space in spaces))
    for _ in range(_MOST_CALLS):
        called = _called_names(file, seen)
        more = {f for f in functions(file) if f.name in called and _outer(file, f) in seen} - seen
        if not more:
            break
        seen |= more
    return seen


def _outer(file: str, function: Function) -> Function | None:
    """The function that another is defined in: only from there (and below) can it be called by its name."""
    around = [f for f in functions(file) if function.inside(f.first, f.last)]
    return max(around, key=lambda f: f.first, default=None)


def _called_names(file: str, seen: set[Function | None]) -> set[str]:
    names = set()
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, ast.Call) and innermost(file, node.lineno) in seen:
            names.add(_called(node) or "")
    return names


def site(file: str, line: int) -> Site:
    """A line of the user's."""
    frame = Frame(file=shown_file(file), line=line, function="", owner=USER)
    return Site(frame=frame, text=linecache.getline(file, line).strip())


def _bound(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
