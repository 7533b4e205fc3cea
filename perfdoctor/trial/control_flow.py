"""Whether the value that a line reads decides what the loop does next: a look at the source, nothing is run.

A read may stand in a test itself (`if loss.item() > 9`), or be named, and the name tested later (`bad = loss.item()`
... `if bad`). Names are followed through assignments and containers, into the user's functions and objects that they
are handed to (those of other modules included), and out of functions that return them.
"""

from __future__ import annotations

import ast
import functools
import linecache
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from perfdoctor.record.owners import USER, file_owner
from perfdoctor.record.syntax import tree_of
from perfdoctor.trial.call_hooks import Place
from perfdoctor.trial.deciding_tests import (
    HARMLESS,
    Test,
    calls_in,
    can_hold,
    only_notes,
    spans,
    tests_in,
)
from perfdoctor.trial.source_names import (
    CONTENT,
    Callee,
    Function,
    bound,
    called,
    callees,
    dotted,
    mentioned,
    valued,
    variables_of,
)

_ITERATING = frozenset(
    ("parameters", "named_parameters", "modules", "children", "enumerate", "zip", "items", "values", "keys", "range",
     "reversed", "sorted", "list", "iter")
)  # fmt: skip
# Calls that put what they get into the object they are called on.
_STORING = frozenset(("append", "appendleft", "extend", "insert", "add", "setdefault"))
_DEPTH = 3  # functions that are followed into one another
_MOST_FOLLOWED = 300  # functions and ways to call them; a read whose value goes further is judged by what was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Names that get what the sources are."""

    sources: tuple[ast.expr, ...]
    targets: set[str]
    loops: bool = False  # the variables of a loop over the source


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """Where the value decides. `direct`: the test is `compare`, in which `name` (or the read) stands for the value."""

    file: str
    line: int
    text: str
    direct: bool = False
    test: ast.expr | None = None
    value: str = ""  # source of what stands for the value in `test`


def find_test(file: str, line: int, caller: Place | None = None, calls: Collection[str] = ()) -> Tested | None:
    """The first place where what `line` of `file` reads decides something, or None.

    `calls` names the methods that were seen to read there ('item', '__bool__', ...); with none, any call may read.
    """
    tree = tree_of(file)
    if tree is None:
        return None
    found = _tested_on(tree, file, line, frozenset(calls))
    if found is None and _returned(tree, line, frozenset(calls)):
        found = _tested_by_callers(tree, file, line, caller)
    return found


def _tested_by_callers(tree: ast.Module, file: str, line: int, caller: Place | None) -> Tested | None:
    """Where what a function returns decides: on the line that was seen to call it, or on one that names it."""
    if caller is not None:
        other = tree_of(caller.file)
        return None if other is None else _tested_on(other, caller.file, caller.first, frozenset())
    scope = _scope(tree, line)
    if not isinstance(scope, Function) or not _depth_in(file):
        return None
    lines = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Call) and called(n) == scope.name]
    return next((found for each in lines if (found := _tested_on(tree, file, each, frozenset()))), None)


def outcome_is_fixed(tested: Tested, values: Iterable[Any]) -> bool:
    """Whether the test came out the same for every value seen. Only tests of the value alone are judged."""
    if tested.test is None or not tested.value:
        return False
    source = ast.unparse(_Unnamed().visit(ast.parse(ast.unparse(tested.test), mode="eval")))
    source = source.replace(tested.value, "(_value)")
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    if not names <= {"_value", "math", "abs", "float", "bool", "np", "numpy"}:
        return False
    scope = {"math": math, "abs": abs, "float": float, "bool": bool, "__builtins__": {}}
    try:
        outcomes = {bool(eval(source, scope, {"_value": value})) for value in values}
    except Exception:  # whatever the user's expression does with a stray value
        return False
    return len(outcomes) == 1


class _Unnamed(ast.NodeTransformer):
    """`(v := x)` as `x`."""

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        value: ast.expr = self.visit(node.value)
        return value


def _tested_on(tree: ast.Module, file: str, line: int, calls: frozenset[str]) -> Tested | None:
    statement = _statement(tree, line)
    for test in tests_in(tree):
        if spans(test.expression, line) and can_hold(test, calls, statement):
            return _tested(test.expression, file, direct=_sole_read(test.expression))
    scope = _scope(tree, line)
    names, exact = _names_from(scope, line, calls, statement)

    def holds(given: ast.expr) -> bool:
        if isinstance(given, ast.Lambda):  # whoever calls it gets the value
            return False
        read_here = spans(given, line) and can_hold(Test(expression=given), calls, statement)
        return read_here or bool(names & valued(given))

    return _tested_from(
        _Origin(tree=tree, file=file, scope=scope, names=names, exact=exact, holds=holds, known={}), _depth_in(file)
    )


def _depth_in(file: str) -> int:
    """A library hands its values to callbacks, loggers and back: followed there, everything would decide by them."""
    return _DEPTH if file_owner(file) == USER else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """A function (or a module) in which some names stand for the value. `holds`: whether an argument does."""

    tree: ast.Module
    file: str
    scope: ast.AST
    names: set[str]
    exact: set[str]
    holds: Callable[[ast.expr], bool]
    known: dict[Any, tuple[Tested | None, set[str]]]  # what following a function gave, by how it was called


def _tested_from(origin: _Origin, depth: int) -> Tested | None:
    """Where the names decide: here, or in the user's functions that they are handed to."""
    found = _decides(origin)
    size = -1
    while found is None and depth and size != len(origin.names):
        size = len(origin.names)
        for call in [node for node in ast.walk(origin.scope) if isinstance(node, ast.Call)]:
            found = _tested_by(call, origin, depth)
            if found is not None:
                return found
        _spread(origin.scope, origin.names)
    return found or _decides(origin)


def _decides(origin: _Origin) -> Tested | None:
    for place, names in _reach(origin):
        for test in tests_in(place):
            used = names & valued(test.expression)
            if used:
                name = next(iter(used))
                exact = name if len(used) == 1 and name in origin.exact else ""
                return _tested(test.expression, origin.file, direct=exact)
    return None


def _tested_by(call: ast.Call, origin: _Origin, depth: int) -> Tested | None:
    """Where what a call hands over decides. What it leaves in an object is added to the names."""
    if not any(origin.holds(given) for given in (*call.args, *(each.value for each in call.keywords))):
        return None
    known = list(callees(call, origin.tree, origin.file))
    for callee in known:
        found, marks = _tested_in(callee, callee.parameters(call, origin.holds), origin, call, depth)
        if found is not None:
            return found
        origin.names.update(f"{callee.receiver}.{mark}" for mark in marks)
    if not known and called(call) == "update" and isinstance(call.func, ast.Attribute):
        origin.names.update(f"{name}{CONTENT}" for name in bound(call.func.value))  # of a dict
    return None


def _reach(origin: _Origin) -> list[tuple[ast.AST, set[str]]]:
    """Where to look for which names: all in the function, those of its object in the class, others where they live."""
    kinds, outer = _related(origin.tree, origin.scope), _outer(origin.scope)
    own = {name for name in origin.names if name.startswith("self.")} if kinds else set()
    found: list[tuple[ast.AST, set[str]]] = [(origin.scope, origin.names)]
    found += [(kind, own) for kind in kinds if own]
    for name in origin.names - own:
        if "." in name or name.removesuffix(CONTENT) in outer:
            found.append((_home(origin, name.partition(".")[0].removesuffix(CONTENT)), {name}))
    return found


def _home(origin: _Origin, name: str) -> ast.AST:
    """The function around (or at) the origin whose variable `name` is, the module where none has it."""
    for function in reversed(_around(origin.tree, origin.scope)):
        if name in variables_of(function):
            return function
    return origin.tree


@functools.lru_cache(maxsize=1024)
def _around(tree: ast.Module, scope: ast.AST) -> tuple[Function, ...]:
    """The functions around a scope and itself, the outermost first."""
    functions = (each for each in ast.walk(tree) if isinstance(each, Function))
    return tuple(each for each in functions if any(n is scope for n in ast.walk(each)))


@functools.lru_cache(maxsize=1024)
def _related(tree: ast.Module, scope: ast.AST) -> list[ast.ClassDef]:
    """The class around a function, its bases and what derives from it, in the file."""
    kinds = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    around = [kind for kind in kinds if any(node is scope for node in ast.walk(kind))][-1:]
    names = {kind.name for kind in around} | {dotted(base) for kind in around for base in kind.bases}
    derived = [kind for kind in kinds if {dotted(base) for base in kind.bases} & {each.name for each in around}]
    return [kind for kind in kinds if kind in derived or kind in around or (around and kind.name in names)]


def _tested_in(
    callee: Callee, parameters: set[str], origin: _Origin, call: ast.Call, depth: int
) -> tuple[Tested | None, set[str]]:
    """Where a function decides by some of its parameters, and which attributes of its object it makes of them."""
    if not parameters:
        return None, set()
    sole = (
        len(call.args) == 1 and not call.keywords and (_is_read(call.args[0]) or dotted(call.args[0]) in origin.exact)
    )
    key = callee.function, frozenset(parameters), depth, sole, callee.own_name
    if key not in origin.known:
        origin.known[key] = None, set()  # a function that comes back to itself adds nothing
        if len(origin.known) <= _MOST_FOLLOWED:
            origin.known[key] = _followed(callee, parameters, origin, depth, sole)
    return origin.known[key]


def _followed(
    callee: Callee, parameters: set[str], origin: _Origin, depth: int, sole: bool
) -> tuple[Tested | None, set[str]]:
    names = set(parameters)
    _spread(callee.function, names)
    inner = _Origin(
        tree=callee.tree,
        file=callee.file,
        scope=callee.function,
        names=names,
        exact=set(parameters) if sole else set(),
        holds=lambda given: bool(names & valued(given)),
        known=origin.known,
    )
    found = _tested_from(inner, depth - 1)
    own = f"{callee.own_name}." if callee.own_name else ""
    return found, {name.removeprefix(own) for name in names if own and name.startswith(own)}


def _statement(tree: ast.Module, line: int) -> ast.AST | None:
    """The innermost statement around the line."""
    found: ast.AST | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and spans(node, line):
            found = node
    return found


@functools.lru_cache(maxsize=1024)
def _outer(scope: ast.AST) -> set[str]:
    """Names that a function shares with what is around it."""
    return {n for each in ast.walk(scope) if isinstance(each, ast.Global | ast.Nonlocal) for n in each.names}


def _tested(test: ast.expr, file: str, *, direct: str) -> Tested:
    text = linecache.getline(file, test.lineno).strip()
    return Tested(
        file=file, line=test.lineno, text=text, direct=bool(direct), test=test if direct else None, value=direct
    )


def _sole_read(test: ast.expr) -> str:
    """The source of the one call in the test that reads, '' where several might."""
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Call) and called(node) in ("item", "float", "int")]
    return ast.unparse(calls[0]) if len(calls) == 1 else ""


def _scope(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function whose body holds the line, the module where there is none.

    Decorators and defaults are evaluated outside of the function that they stand at.
    """
    found: ast.AST = tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _holds_in_body(node, line):
            found = node  # ast.walk goes from the outside in
    return found


def _holds_in_body(node: ast.FunctionDef | ast.AsyncFunctionDef, line: int) -> bool:
    outside = (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults)
    first = node.body[0].lineno
    return first <= line <= (node.end_lineno or first) and not any(spans(each, line) for each in outside if each)


def _names_from(
    scope: ast.AST, line: int, calls: frozenset[str], statement: ast.AST | None
) -> tuple[set[str], set[str]]:
    """Names that hold what the line reads, and those that hold exactly it: followed until nothing new comes up."""
    names: set[str] = set()
    exact: set[str] = set()
    for flow in _flows(scope):
        if any(spans(source, line) and _gives(flow, source, calls, statement) for source in flow.sources):
            names |= flow.targets
            if _is_read(flow.sources[0]):
                exact |= flow.targets
    _spread(scope, names)
    return names, exact


def _spread(scope: ast.AST, names: set[str]) -> None:
    """Follow the names through assignments until nothing new comes up."""
    flows = [(flow, [valued(source) for source in flow.sources]) for flow in _flows(scope)]
    size = -1
    while size != len(names):
        size = len(names)
        for flow, used in flows:
            if any(names & each for each in used):
                names |= flow.targets


def _is_read(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and called(value) in ("item", "float", "int", "bool")


def _gives(flow: Flow, source: ast.expr, calls: frozenset[str], statement: ast.AST | None) -> bool:
    """Whether a source on the line of the read can hold it. What a loop goes over is seldom what the line reads."""
    if not flow.loops:
        return not isinstance(source, ast.Constant)
    inside = calls_in(source) - HARMLESS - _ITERATING
    return can_hold(Test(expression=source, truth=True), calls, statement) if inside else False


@functools.lru_cache(maxsize=1024)
def _flows(scope: ast.AST) -> tuple[Flow, ...]:
    return tuple(_flows_in(scope))


def _flows_in(scope: ast.AST) -> Iterator[Flow]:
    """Where values go: assignments, the variables of loops, and what an `if` notes in a name."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield Flow(sources=(node.value,), targets=_targets(node))
        elif isinstance(node, ast.For | ast.comprehension):
            yield Flow(sources=(node.iter,), targets=bound(node.target), loops=True)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and called(node) in _STORING:
            given = (*node.args, *(each.value for each in node.keywords))
            yield Flow(sources=given, targets={f"{name}{CONTENT}" for name in bound(node.func.value)})
        elif isinstance(node, ast.If) and only_notes(node):
            noted = (each for each in node.body + node.orelse if isinstance(each, ast.Assign | ast.AugAssign))
            yield Flow(sources=(node.test,), targets={name for each in noted for name in _targets(each)})


def _targets(statement: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {name for target in targets for name in bound(target)}


def _returned(tree: ast.Module, line: int, calls: frozenset[str]) -> bool:
    """Whether a `return` hands on what the line reads."""
    scope = _scope(tree, line)
    names, _ = _names_from(scope, line, calls, _statement(tree, line))
    returns = (node for node in ast.walk(scope) if isinstance(node, ast.Return))
    return any(spans(node, line) or names & mentioned(node) for node in returns)
