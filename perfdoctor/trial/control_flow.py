"""Whether the value that a line reads decides what the loop does next: a look at the source, nothing is run.

A read may stand in a test itself (`if loss.item() > 9`), or be named, and the name tested later (`bad = loss.item()`
... `if bad`). Names are followed through assignments within the file. Sizes, ranges, slices and subscripts count as
tests: a stale one would index past an end.
"""

from __future__ import annotations

import ast
import linecache
import math
from collections.abc import Iterable, Iterator
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """Where the value decides. `direct`: the test is `compare`, in which `name` (or the read) stands for the value."""

    line: int
    text: str
    direct: bool = False
    test: ast.expr | None = None
    value: str = ""  # source of what stands for the value in `test`


def find_test(file: str, line: int, caller: Place | None = None) -> Tested | None:
    """The first place where what `line` of `file` reads decides something, or None."""
    tree = _tree(file)
    if tree is None:
        return None
    found = _tested_on(tree, file, line)
    if found is None and caller is not None and _returned(tree, line):
        other = _tree(caller.file)
        found = None if other is None else _tested_on(other, caller.file, caller.first)
    return found


def outcome_is_fixed(tested: Tested, values: Iterable[Any]) -> bool:
    """Whether the test came out the same for every value seen. Only tests of the value alone are judged."""
    if tested.test is None or not tested.value:
        return False
    source = ast.unparse(tested.test).replace(tested.value, "(_value)")
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


def _tested_on(tree: ast.Module, file: str, line: int) -> Tested | None:
    for test in _tests(tree):
        if _spans(test, line) and _reads(test):
            return _tested(test, file, direct=_sole_read(test))
    scope = _scope(tree, line)
    names, exact = _names_from(scope, line)
    if not names:
        return None
    for test in _tests(scope):
        used = names & _names(test)
        if used and not _spans(test, line):
            name = next(iter(used))
            return _tested(test, file, direct=name if len(used) == 1 and name in exact else "")
    return None


def _tested(test: ast.expr, file: str, *, direct: str) -> Tested:
    text = linecache.getline(file, test.lineno).strip()
    return Tested(line=test.lineno, text=text, direct=bool(direct), test=test if direct else None, value=direct)


def _tests(tree: ast.AST) -> Iterator[ast.expr]:
    """Every expression that decides: tests, sizes, bounds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            if not _harmless(node):
                yield node.test
        elif isinstance(node, ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Subscript):
            yield node.slice
        elif isinstance(node, ast.Call) and _called(node) in _SIZES:
            yield from node.args
        elif isinstance(node, ast.Match):
            yield node.subject


def _harmless(node: ast.If | ast.While | ast.IfExp) -> bool:
    """An `if` whose branches only note or show something: `if loss < best: best = loss`."""
    if not isinstance(node, ast.If):
        return isinstance(node, ast.IfExp)
    return all(
        isinstance(each, ast.Assign | ast.AugAssign | ast.Pass) and _plain(each) for each in node.body + node.orelse
    )


def _plain(statement: ast.stmt) -> bool:
    return not any(isinstance(node, ast.Call) for node in ast.walk(statement))


def _called(node: ast.Call) -> str:
    func = node.func
    return func.attr if isinstance(func, ast.Attribute) else (func.id if isinstance(func, ast.Name) else "")


def _spans(node: ast.AST, line: int) -> bool:
    first: int | None = getattr(node, "lineno", None)
    last: int | None = getattr(node, "end_lineno", None)
    return first is not None and first <= line <= (last or first)


def _reads(test: ast.expr) -> bool:
    """Whether a test that lies on the line can hold the read: not a constant, a plain name alone may be a tensor."""
    return not isinstance(test, ast.Constant)


def _sole_read(test: ast.expr) -> str:
    """The source of the one call in the test that reads, '' where several might."""
    calls = [
        node for node in ast.walk(test) if isinstance(node, ast.Call) and _called(node) in ("item", "float", "int")
    ]
    return ast.unparse(calls[0]) if len(calls) == 1 else ""


def _scope(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function around the line, the module where there is none."""
    found: ast.AST = tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _spans(node, line):
            found = node  # ast.walk goes from the outside in
    return found


def _names_from(scope: ast.AST, line: int) -> tuple[set[str], set[str]]:
    """Names that hold what the line reads, and those that hold exactly it: followed until nothing new comes up."""
    names: set[str] = set()
    exact: set[str] = set()
    for statement in _assignments(scope):
        if _spans(statement, line):
            targets = _targets(statement)
            names |= targets
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
                exact |= targets if _called(statement.value) in ("item", "float", "int", "bool") else set()
    size = -1
    while size != len(names):
        size = len(names)
        for statement in _assignments(scope):
            if statement.value is not None and names & _names(statement.value):
                names |= _targets(statement)
    return names, exact


def _assignments(scope: ast.AST) -> Iterator[ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr]:
    return (n for n in ast.walk(scope) if isinstance(n, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr))


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


def _returned(tree: ast.Module, line: int) -> bool:
    return any(isinstance(node, ast.Return) and _spans(node, line) for node in ast.walk(tree))
