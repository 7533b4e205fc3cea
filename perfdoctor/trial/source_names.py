"""Names in a source: what an expression mentions, what an assignment binds, what a call gives to parameters.

Dotted names stand for themselves and for what they lie in: `self.stop.best` mentions 'self', 'self.stop' and
'self.stop.best'. 'rows[]' is what the container `rows` holds, whose length does not depend on it.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from perfdoctor.record.instruction import call_name
from perfdoctor.record.owners import USER, file_owner
from perfdoctor.record.syntax import tree_of

CONTENT = "[]"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def dotted(node: ast.AST) -> str:
    """'self.stop.best', '' for what is no plain chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def mentioned(node: ast.AST) -> set[str]:
    """Names and dotted names in a piece of source."""
    return {name for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute) and (name := dotted(each))}


def valued(node: ast.AST) -> set[str]:
    """Names by whose value an expression goes: of `len(rows)` the rows, not what they hold; of `x is None` none."""
    inside_len = {id(n) for each in ast.walk(node) if _is_len(each) for n in ast.walk(each)}
    inside_is = {id(n) for each in ast.walk(node) if _is_identity(each) for n in ast.walk(each)}
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute) and id(each) not in inside_is and (name := dotted(each)):
            found |= {name} if id(each) in inside_len else {name, f"{name}{CONTENT}"}
    return found


def _is_len(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and called(node) == "len" and len(node.args) == 1 and bool(dotted(node.args[0]))


def _is_identity(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)


def bound(target: ast.expr) -> set[str]:
    """What an assignment to `target` changes: of `rows[i]` the rows, of `self.best` that attribute alone."""
    if isinstance(target, ast.Tuple | ast.List):
        return {name for each in target.elts for name in bound(each)}
    if isinstance(target, ast.Starred):
        return bound(target.value)
    if isinstance(target, ast.Subscript):
        return {f"{name.removesuffix(CONTENT)}{CONTENT}" for name in bound(target.value)}
    return {name} if (name := dotted(target)) else set()


def variables_of(function: Function) -> set[str]:
    """The function's own variables: its parameters, and what is assigned in it but not in functions inside."""
    spec = function.args
    found = {arg.arg for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg) if arg}
    shared: set[str] = set()
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Global | ast.Nonlocal):
            shared |= set(node.names)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        waiting += ast.iter_child_nodes(node)
    return found - shared


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    return call_name(node.func)


@dataclass(frozen=True, slots=True, kw_only=True)
class Callee:
    """A function of the user's that a call may run. `owner` is its class; `receiver` what stands for its `self`."""

    function: Function
    file: str
    tree: ast.Module
    owner: ast.ClassDef | None = None
    receiver: str = ""

    @property
    def own_name(self) -> str:
        """The name of its first parameter, where that is the object."""
        plain = all(dotted(each) != "staticmethod" for each in self.function.decorator_list)
        names = [arg.arg for arg in (*self.function.args.posonlyargs, *self.function.args.args)]
        return names[0] if self.owner is not None and plain and names else ""

    def parameters(self, call: ast.Call, holds: Callable[[ast.expr], bool]) -> set[str]:
        """The parameters that get an argument which `holds`."""
        spec = self.function.args
        names = [arg.arg for arg in (*spec.posonlyargs, *spec.args)][1 if self.own_name else 0 :]
        found = set()
        for place, given in enumerate(call.args):
            if holds(given):
                starred = isinstance(given, ast.Starred)
                found |= set(names[place:] if starred else names[place : place + 1])
                found |= {spec.vararg.arg} if spec.vararg is not None and place >= len(names) else set()
        everything = {*names, *(arg.arg for arg in spec.kwonlyargs)}
        for keyword in call.keywords:
            if holds(keyword.value):
                rest = {spec.kwarg.arg} if spec.kwarg is not None else set()
                known = {keyword.arg} & everything if keyword.arg else everything
                found |= {name for name in known if name} or rest
        return found


def callees(call: ast.Call, tree: ast.Module, file: str) -> Iterator[Callee]:
    """The user's functions that a call may run, as far as the source tells."""
    func = call.func
    if isinstance(func, ast.Attribute):
        receiver = dotted(func.value)
        module = _imported(tree).get(receiver)
        if module is not None:
            yield from _functions(module, func.attr)
        else:
            yield from _own_methods(tree, file, call, func.attr) or _methods(tree, file, receiver, (func.attr,))
    elif isinstance(func, ast.Name):
        found = list(_functions((file, tree, func.id), func.id))
        if not found and func.id in _imported(tree):
            found = list(_functions(_imported(tree)[func.id], func.id))
        yield from found or _methods(tree, file, func.id, ("__call__", "forward"), known=True)
    if isinstance(func, ast.Attribute):
        yield from _methods(tree, file, dotted(func), ("__call__", "forward"), known=True)


_Source = tuple[str, ast.Module, str]  # file, its tree, the name in it that is meant


def _functions(source: _Source, name: str) -> Iterator[Callee]:
    file, tree, own = source
    for node in _free_functions(tree).get(own or name, ()):
        yield Callee(function=node, file=file, tree=tree)


@functools.lru_cache(maxsize=64)  # walking a large file once for each call in it takes minutes
def _free_functions(tree: ast.Module) -> dict[str, list[Function]]:
    """Functions that are no methods, by name."""
    inside = {each for kind in _classes(tree) for each in kind.body}
    found: dict[str, list[Function]] = {}
    for node in ast.walk(tree):
        if isinstance(node, Function) and node not in inside:
            found.setdefault(node.name, []).append(node)
    return found


def _own_methods(tree: ast.Module, file: str, call: ast.Call, name: str) -> list[Callee]:
    """Of `self.name(...)`: the method of the class around the call, where that class has it."""
    assert isinstance(call.func, ast.Attribute)
    if dotted(call.func.value) != "self":
        return []
    kind = _class_around(tree).get(call)
    around = [] if kind is None else [kind]
    found = [(kind, node) for kind in around for node in kind.body if isinstance(node, Function) and node.name == name]
    return [Callee(function=node, file=file, tree=tree, owner=kind, receiver="self") for kind, node in found]


def _methods(
    tree: ast.Module, file: str, receiver: str, names: tuple[str, ...], *, known: bool = False
) -> Iterator[Callee]:
    """Methods of the class that `receiver` was made of; with `known` unset, of any class of the file where none is."""
    kinds = list(_classes_of(tree, file, receiver))
    if not kinds and not known and receiver:
        kinds = [(file, tree, each) for each in _classes(tree)]
    for where, whole, kind in kinds:
        for node in kind.body:
            if isinstance(node, Function) and node.name in names:
                yield Callee(function=node, file=where, tree=whole, owner=kind, receiver=receiver)


@functools.lru_cache(maxsize=64)
def _classes(tree: ast.AST) -> tuple[ast.ClassDef, ...]:
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


@functools.lru_cache(maxsize=64)
def _class_around(tree: ast.Module) -> dict[ast.AST, ast.ClassDef]:
    """The innermost class around each call in a class."""
    return {node: kind for kind in _classes(tree) for node in ast.walk(kind) if isinstance(node, ast.Call)}


@functools.lru_cache(maxsize=64)
def _makers(tree: ast.Module) -> dict[str, set[str]]:
    """Names that the result of a call is assigned to -> what is called."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in {name for target in targets for name in bound(target)}:
                found.setdefault(name, set()).add(dotted(node.value.func))
    return found


def _classes_of(tree: ast.Module, file: str, receiver: str) -> Iterator[tuple[str, ast.Module, ast.ClassDef]]:
    """The classes whose calls are assigned to `receiver` anywhere in the file."""
    for name in _makers(tree).get(receiver, ()):
        yield from ((file, tree, each) for each in _classes(tree) if each.name == name)
        first, _, last = name.rpartition(".")
        source = _imported(tree).get(first or name)
        if source is not None:
            where, whole, own = source
            yield from ((where, whole, each) for each in _classes(whole) if each.name == (last if first else own))


@functools.lru_cache(maxsize=64)
def _imported(tree: ast.Module) -> dict[str, _Source]:
    """Names that an import binds -> the user's file behind them."""
    found: dict[str, _Source] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            rows = [(alias.asname or alias.name, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            rows = [(alias.asname or alias.name, module, alias.name) for alias in node.names]
            rows += [(alias.asname or alias.name, f"{module}.{alias.name}".strip("."), "") for alias in node.names]
        else:
            continue
        for name, module, own in rows:
            if name not in found and (file := _file_of(module, relative=bool(getattr(node, "level", 0)))):
                whole = tree_of(file)
                if whole is not None:
                    found[name] = (file, whole, own)
    return found


def _file_of(module: str, *, relative: bool) -> str:
    """The user's file of a loaded module."""
    for name in [module, *(each for each in list(sys.modules) if relative and each.endswith(f".{module}"))]:
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and file_owner(file) == USER:
            return file
    return ""
