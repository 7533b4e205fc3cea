"""Tests: the expressions in a source by whose value something is decided, and which of them can hold a read.

Sizes, ranges, slices and subscripts count as tests: a stale one would index past an end.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from perfdoctor.trial.source_names import called, mentioned

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
HARMLESS = frozenset(
    ("isinstance", "issubclass", "len", "hasattr", "callable", "getattr", "id", "type", "dim", "size", "numel",
     "is_initialized", "is_available", "get_rank", "get_world_size", "perf_counter", "time", "startswith", "endswith")
)  # fmt: skip
# Calls that a branch may make and still only note or show something.
_SHOWING = frozenset(("print", "append", "info", "debug", "warning", "item", "float", "int", "format", "str"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """An expression that decides: by its truth, else by its value (a size, an index)."""

    expression: ast.expr
    truth: bool = True


def can_hold(test: Test, calls: frozenset[str], statement: ast.AST | None) -> bool:
    """Whether a test on the line of a read can hold that read: the line may as well read beside its test.

    `sum(p.grad.norm().item() for p in ps if p.grad is not None)` reads with `.item()`, which its test does not call.
    """
    explicit = {word for name in calls for word in _WRITTEN.get(name, (name,))}
    inside = calls_in(test.expression)
    if not calls:
        return bool(inside - HARMLESS)
    if inside & explicit or ("__contains__" in calls and _asks_membership(test.expression)):
        return True
    if calls & _IMPLICIT and _converts(test):
        return True
    if "__format__" in calls and any(isinstance(node, ast.FormattedValue) for node in ast.walk(test.expression)):
        return True
    beside = statement is not None and bool(calls_in(statement) & explicit)
    return not beside and bool(inside - HARMLESS)  # a library's own read, inside a call of the test


def _converts(test: Test) -> bool:
    """Whether evaluating the test itself may ask a tensor for its truth, or for an index."""
    if not test.truth:
        return not isinstance(test.expression, ast.Constant | ast.Slice) and bool(mentioned(test.expression))
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
    return not (isinstance(part, ast.Call) and called(part) in HARMLESS)


def _asks_membership(test: ast.expr) -> bool:
    compared = (node for node in ast.walk(test) if isinstance(node, ast.Compare))
    return any(isinstance(op, ast.In | ast.NotIn) for node in compared for op in node.ops)


def calls_in(node: ast.AST) -> set[str]:
    return {called(each) for each in ast.walk(node) if isinstance(each, ast.Call)}


def tests_in(tree: ast.AST) -> Iterator[Test]:
    """Every expression that decides: tests, sizes, bounds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            if not only_notes(node):
                yield Test(expression=node.test)
        elif isinstance(node, ast.Assert):
            yield Test(expression=node.test)
        elif isinstance(node, ast.comprehension):
            yield from (Test(expression=each) for each in node.ifs)
        elif isinstance(node, ast.Subscript):
            yield Test(expression=node.slice, truth=False)
        elif isinstance(node, ast.Call) and called(node) in _SIZES:
            yield from (Test(expression=each, truth=False) for each in node.args)
        elif isinstance(node, ast.Match):
            yield Test(expression=node.subject, truth=False)
            yield from (Test(expression=case.guard) for case in node.cases if case.guard is not None)


def only_notes(node: ast.If | ast.While | ast.IfExp) -> bool:
    """An `if` whose branches only note or show something: `if loss < best: best = loss`."""
    if isinstance(node, ast.While):
        return False
    if isinstance(node, ast.IfExp):
        return not (calls_in(node.body) | calls_in(node.orelse)) - _SHOWING
    kinds = (ast.Assign, ast.AugAssign, ast.Pass, ast.Expr)
    return all(isinstance(each, kinds) and _plain(each) for each in node.body + node.orelse)


def _plain(statement: ast.stmt) -> bool:
    return not calls_in(statement) - _SHOWING


def spans(node: ast.AST, line: int) -> bool:
    first: int | None = getattr(node, "lineno", None)
    last: int | None = getattr(node, "end_lineno", None)
    return first is not None and first <= line <= (last or first)
