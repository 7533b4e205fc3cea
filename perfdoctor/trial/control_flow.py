"""Whether the value that a line reads decides what the loop does next: a look at the source, nothing is run.

A read may stand in a test itself (`if loss.item() > 9`), or be named, and the name tested later (`bad = loss.item()`
... `if bad`). Names are followed through assignments within the file. Sizes, ranges, slices and subscripts count as
tests: a stale one would index past an end.
"""

from __future__ import annotations

import ast
import linecache
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from perfdoctor.trial.call_hooks import Place

_SIZES = frozenset(
    (
        "range",
        "arange",
        "zeros",
        "ones",
        "empty",
        "full",
        "view",
        "reshape",
        "expand",
        "narrow",
        "split",
        "chunk",
        "islice",
    )
)


# What is written where a method of a tensor is called without its name.
_WRITTEN = {
    "__bool__": ("bool",),
    "__float__": ("float",),
    "__int__": ("int", "round", "floor", "ceil"),
    "__index__": ("index",),
    "__complex__": ("complex",),
    "__format__": ("format",),
    "__repr__": ("str", "repr", "print"),
    "__array__": ("array", "asarray", "numpy"),
}
_IMPLICIT = frozenset(("__bool__", "__index__", "__int__", "is_nonzero"))  # asked for by a test, or by an index
_HARMLESS = frozenset(
    ("isinstance", "issubclass", "len", "hasattr", "callable", "getattr", "id", "type", "dim", "size", "numel",
     "is_initialized", "is_available", "get_rank", "get_world_size", "perf_counter", "time", "startswith", "endswith")
)  # fmt: skip
_ITERATING = frozenset(
    ("parameters", "named_parameters", "modules", "children", "enumerate", "zip", "items", "values", "keys", "range",
     "reversed", "sorted", "list", "iter")
)  # fmt: skip
# Calls that a branch may make and still only note or show something.
_SHOWING = frozenset(("print", "append", "info", "debug", "warning", "item", "float", "int", "format", "str"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """An expression that decides: by its truth, else by its value (a size, an index)."""

    expression: ast.expr
    truth: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Names that get what the sources are."""

    sources: tuple[ast.expr, ...]
    targets: set[str]
    loops: bool = False  # the variables of a loop over the source


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """Where the value decides. `direct`: the test is `compare`, in which `name` (or the read) stands for the value."""

    line: int
    text: str
    direct: bool = False
    test: ast.expr | None = None
    value: str = ""  # source of what stands for the value in `test`


def find_test(file: str, line: int, caller: Place | None = None, calls: Collection[str] = ()) -> Tested | None:
    """The first place where what `line` of `file` reads decides something, or None.

    `calls` names the methods that were seen to read there ('item', '__bool__', ...); with none, any call may read.
    """
    tree = _tree(file)
    if tree is None:
        return None
    found = _tested_on(tree, file, line, frozenset(calls))
    if found is None and caller is not None and _returned(tree, line, frozenset(calls)):
        other = _tree(caller.file)
        found = None if other is None else _tested_on(other, caller.file, caller.first, frozenset())
    return found


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


def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


class _Unnamed(ast.NodeTransformer):
    """`(v := x)` as `x`."""

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        value: ast.expr = self.visit(node.value)
        return value


def _tested_on(tree: ast.Module, file: str, line: int, calls: frozenset[str]) -> Tested | None:
    statement = _statement(tree, line)
    for test in _tests(tree):
        if _spans(test.expression, line) and can_hold(test, calls, statement):
            return _tested(test.expression, file, direct=_sole_read(test.expression))
    scope = _scope(tree, line)
    names, exact = _names_from(scope, line, calls, statement)
    for test in _tests(tree if any("." in name for name in names) or names & _outer(scope) else scope):
        used = names & _names(test.expression)
        if used:
            name = next(iter(used))
            return _tested(test.expression, file, direct=name if len(used) == 1 and name in exact else "")
    return None


def can_hold(test: Test, calls: frozenset[str], statement: ast.AST | None) -> bool:
    """Whether a test on the line of a read can hold that read: the line may as well read beside its test.

    `sum(p.grad.norm().item() for p in ps if p.grad is not None)` reads with `.item()`, which its test does not call.
    """
    explicit = {word for name in calls for word in _WRITTEN.get(name, (name,))}
    inside = _calls_in(test.expression)
    if not calls:
        return bool(inside - _HARMLESS)
    if inside & explicit or ("__contains__" in calls and _asks_membership(test.expression)):
        return True
    if calls & _IMPLICIT and _converts(test):
        return True
    if "__format__" in calls and any(isinstance(node, ast.FormattedValue) for node in ast.walk(test.expression)):
        return True
    beside = statement is not None and bool(_calls_in(statement) & explicit)
    return not beside and bool(inside - _HARMLESS)  # a library's own read, inside a call of the test


def _converts(test: Test) -> bool:
    """Whether evaluating the test itself may ask a tensor for its truth, or for an index."""
    if not test.truth:
        return not isinstance(test.expression, ast.Constant | ast.Slice) and bool(_names(test.expression))
    return any(_may_be_tensor(part) for part in _conditions(test.expression))


def _conditions(test: ast.expr) -> Iterator[ast.expr]:
    """The parts of a test whose truth is asked for."""
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _conditions(part)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _conditions(test.operand)
    elif isinstance(test, ast.NamedExpr):
        yield from _conditions(test.value)
    else:
        yield test


def _may_be_tensor(part: ast.expr) -> bool:
    if isinstance(part, ast.Constant | ast.JoinedStr | ast.List | ast.Tuple | ast.Dict | ast.Set | ast.Lambda):
        return False
    if isinstance(part, ast.Compare):
        if all(isinstance(op, ast.Is | ast.IsNot) for op in part.ops):
            return False
        # `i % 10 == 0`, `epoch > 3`: counters. A remainder of a tensor is not what anybody tests.
        return not (isinstance(part.left, ast.BinOp) and isinstance(part.left.op, ast.Mod))
    return not (isinstance(part, ast.Call) and _called(part) in _HARMLESS)


def _asks_membership(test: ast.expr) -> bool:
    compared = (node for node in ast.walk(test) if isinstance(node, ast.Compare))
    return any(isinstance(op, ast.In | ast.NotIn) for node in compared for op in node.ops)


def _calls_in(node: ast.AST) -> set[str]:
    return {_called(each) for each in ast.walk(node) if isinstance(each, ast.Call)}


def _statement(tree: ast.Module, line: int) -> ast.AST | None:
    """The innermost statement around the line."""
    found: ast.AST | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and _spans(node, line):
            found = node
    return found


def _outer(scope: ast.AST) -> set[str]:
    """Names that a function shares with what is around it."""
    return {n for each in ast.walk(scope) if isinstance(each, ast.Global | ast.Nonlocal) for n in each.names}


def _tested(test: ast.expr, file: str, *, direct: str) -> Tested:
    text = linecache.getline(file, test.lineno).strip()
    return Tested(line=test.lineno, text=text, direct=bool(direct), test=test if direct else None, value=direct)


def _tests(tree: ast.AST) -> Iterator[Test]:
    """Every expression that decides: tests, sizes, bounds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            if not _harmless(node):
                yield Test(expression=node.test)
        elif isinstance(node, ast.Assert):
            yield Test(expression=node.test)
        elif isinstance(node, ast.comprehension):
            yield from (Test(expression=each) for each in node.ifs)
        elif isinstance(node, ast.Subscript):
            yield Test(expression=node.slice, truth=False)
        elif isinstance(node, ast.Call) and _called(node) in _SIZES:
            yield from (Test(expression=each, truth=False) for each in node.args)
        elif isinstance(node, ast.Match):
            yield Test(expression=node.subject, truth=False)
            yield from (Test(expression=case.guard) for case in node.cases if case.guard is not None)


def _harmless(node: ast.If | ast.While | ast.IfExp) -> bool:
    """An `if` whose branches only note or show something: `if loss < best: best = loss`."""
    if isinstance(node, ast.While):
        return False
    if isinstance(node, ast.IfExp):
        return not (_calls_in(node.body) | _calls_in(node.orelse)) - _SHOWING
    kinds = (ast.Assign, ast.AugAssign, ast.Pass, ast.Expr)
    return all(isinstance(each, kinds) and _plain(each) for each in node.body + node.orelse)


def _plain(statement: ast.stmt) -> bool:
    return not _calls_in(statement) - _SHOWING


def _called(node: ast.Call) -> str:
    func = node.func
    return func.attr if isinstance(func, ast.Attribute) else (func.id if isinstance(func, ast.Name) else "")


def _spans(node: ast.AST, line: int) -> bool:
    first: int | None = getattr(node, "lineno", None)
    last: int | None = getattr(node, "end_lineno", None)
    return first is not None and first <= line <= (last or first)


def _sole_read(test: ast.expr) -> str:
    """The source of the one call in the test that reads, '' where several might."""
    calls = [
        node for node in ast.walk(test) if isinstance(node, ast.Call) and _called(node) in ("item", "float", "int")
    ]
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
    return first <= line <= (node.end_lineno or first) and not any(_spans(each, line) for each in outside if each)


def _names_from(
    scope: ast.AST, line: int, calls: frozenset[str], statement: ast.AST | None
) -> tuple[set[str], set[str]]:
    """Names that hold what the line reads, and those that hold exactly it: followed until nothing new comes up."""
    names: set[str] = set()
    exact: set[str] = set()
    flows = list(_flows(scope))
    for flow in flows:
        if any(_spans(source, line) and _gives(flow, source, calls, statement) for source in flow.sources):
            names |= flow.targets
            value = flow.sources[0]
            if isinstance(value, ast.Call) and _called(value) in ("item", "float", "int", "bool"):
                exact |= flow.targets
    size = -1
    while size != len(names):
        size = len(names)
        for flow in flows:
            if any(names & _names(source) for source in flow.sources):
                names |= flow.targets
    return names, exact


def _gives(flow: Flow, source: ast.expr, calls: frozenset[str], statement: ast.AST | None) -> bool:
    """Whether a source on the line of the read can hold it. What a loop goes over is seldom what the line reads."""
    if not flow.loops:
        return not isinstance(source, ast.Constant)
    inside = _calls_in(source) - _HARMLESS - _ITERATING
    return can_hold(Test(expression=source, truth=True), calls, statement) if inside else False


def _flows(scope: ast.AST) -> Iterator[Flow]:
    """Where values go: assignments, the variables of loops, and what an `if` notes in a name."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield Flow(sources=(node.value,), targets=_targets(node))
        elif isinstance(node, ast.For | ast.comprehension):
            yield Flow(sources=(node.iter,), targets=_names(node.target), loops=True)
        elif isinstance(node, ast.If) and _harmless(node):
            noted = (each for each in node.body + node.orelse if isinstance(each, ast.Assign | ast.AugAssign))
            yield Flow(sources=(node.test,), targets={name for each in noted for name in _targets(each)})


def _targets(statement: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {name for target in targets for name in _names(target)} - {"self"}


def _names(node: ast.AST) -> set[str]:
    """Names and dotted names: `self.best` counts as 'self.best'."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            found.add(f"{each.value.id}.{each.attr}")
        elif isinstance(each, ast.Name):
            found.add(each.id)
    return found


def _returned(tree: ast.Module, line: int, calls: frozenset[str]) -> bool:
    """Whether a `return` hands on what the line reads."""
    scope = _scope(tree, line)
    names, _ = _names_from(scope, line, calls, _statement(tree, line))
    returns = (node for node in ast.walk(scope) if isinstance(node, ast.Return))
    return any(_spans(node, line) or names & _names(node) for node in returns)
