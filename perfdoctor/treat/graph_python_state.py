"""The Python state that a step can reach: what changes between two calls would be frozen in a graph.

Reached from a function: its closure, the globals that its code names, defaults, the object a method is bound to; from
objects of the user's classes and from modules, their attributes; from lists, sets and dicts, their content; from
iterators, where they stand. Library objects are left alone, except learning-rate schedulers, param groups and modules.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from perfdoctor.record.owners import USER, file_owner
from perfdoctor.treat.batch_tree import slot_names
from perfdoctor.treat.graph_values import (
    SCALARS,
    content,
    is_array,
    missing,
    refill,
    same,
)
from perfdoctor.treat.iterator_position import Position, position

_MOST_OBJECTS = 20_000
_MOST_ITEMS = 1_000
# A module's own books; its children are walked by name.
_MODULE_BOOKS = ("_parameters", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook", "training")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_COMPILED = ("perfdoctor.treat.compiled", "CompiledModel")  # by name: that file imports this one
# Objects of Python's that are there to hold values.
_NAMESPACES = (("types", "SimpleNamespace"), ("argparse", "Namespace"), ("queue", "Queue"))


@dataclass(frozen=True, slots=True)
class Place:
    """One name that holds a value: `owner` names whose, `name` the attribute, key or variable."""

    owner: str
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    content: bool = False  # `read` gives a container, and what it holds is what counts

    def held(self) -> Any:
        """What to compare and to put back."""
        return content(self.read()) if self.content else self.read()

    def same(self, before: Any, now: Any) -> bool:
        """Whether two answers of `held` mean that nothing changed."""
        return same(before, now)

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name


@dataclass(frozen=True, slots=True)
class Change:
    """A place whose value was another after a call."""

    place: Place
    before: Any
    after: Any


class PythonState:
    """What the places hold that a function can reach, at one moment."""

    def __init__(self, *roots: Any) -> None:
        self.found = Reached(*roots)
        self._held = [(place, place.held()) for place in self.found.places]
        self._names = [(mapping, set(mapping)) for _, mapping in self.found.mappings]

    def changes(self) -> list[Change]:
        """Places that hold something else now, in the order in which they were reached."""
        return [
            Change(place, before, now)
            for place, before in self._held
            if not same(before, now := place.held())
        ] + [
            Change(_place(owner, mapping, name), missing, mapping[name])
            for (owner, mapping), (_, names) in zip(self.found.mappings, self._names, strict=True)
            for name in mapping
            if name not in names
        ]  # fmt: skip

    def restore(self) -> None:
        """Put back what each place held."""
        for change in self.changes():
            change.place.write(change.before)


class Reached:
    """Everything a function can reach: the places, and the objects on the way."""

    def __init__(self, *roots: Any) -> None:
        self.places: list[Place] = []
        self.mappings: list[tuple[str, dict[Any, Any]]] = []  # whole name spaces: a new name in one is a change
        self.objects: list[Any] = []
        self._seen: set[int] = set()
        self._waiting: deque[tuple[Any, str]] = deque((root, _title(root)) for root in roots)
        while self._waiting and len(self.objects) < _MOST_OBJECTS:
            value, path = self._waiting.popleft()
            if not isinstance(value, SCALARS) and id(value) not in self._seen:
                self._seen.add(id(value))
                self.objects.append(value)
                self._visit(value, path)

    def of_type(self, kind: type) -> list[Any]:
        """The objects of one type, in the order in which they were reached."""
        return [found for found in self.objects if issubclass(type(found), kind)]

    def read_by(self, codes: set[types.CodeType]) -> list[Place]:
        """Places with a number, a text or a tensor that these functions read by name; param groups are left out."""
        variables = {name for code in codes for name in variable_names(code)}
        attributes = {name for code in codes for name in attribute_names(code)}
        constants = {constant for code in codes for constant in subscripts(code)}
        named = [p for p in self.places if p.name in (attributes if p.owner else variables)]
        items = [
            item
            for place in self.places
            if place.content and place.name.partition("[")[0].rpartition(".")[2] in (variables | attributes)
            for item in _items_at(place, constants)
        ]
        return [
            place
            for place in (*named, *items)
            if ".param_groups[" not in place.owner
            and isinstance(held := place.read(), bool | int | float | str | torch.Tensor)
            and not isinstance(held, Position)
        ]

    def _visit(self, value: Any, path: str) -> None:
        if isinstance(value, torch.nn.Module):
            self._visit_module(value, path)
        elif isinstance(value, torch.optim.Optimizer):
            for index, group in enumerate(value.param_groups):
                held = {name: item for name, item in group.items() if isinstance(item, SCALARS)}
                for name in held:
                    self.places.append(_place(f"{path}.param_groups[{index}]", group, name))
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            self._visit_names(vars(value), path)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self._visit_function(value, path)
        elif (type(value).__module__, type(value).__name__) == _COMPILED:
            self._waiting.append((value.model, path))
        elif isinstance(value, types.BuiltinMethodType):
            self._waiting.append((value.__self__, path))  # add = losses.append
        elif isinstance(value, dict | list | set | deque | tuple):
            self._visit_items(value, path)
        elif is_array(value):
            self.places.append(Place("", path, lambda: value, functools.partial(refill, value), content=True))
        elif (type(value).__module__, type(value).__name__) in _NAMESPACES:
            self._visit_names(vars(value), path)
        elif isinstance(value, types.ModuleType):
            if file_owner(getattr(value, "__file__", None) or "<frozen>") == USER:
                self._visit_names(vars(value), value.__name__, whole=False)
        elif isinstance(value, type):
            self._visit_class(value)
        elif is_users(type(value)):
            if hasattr(value, "__dict__"):
                self._visit_names(vars(value), path)
            self._visit_slots(value, path)
            self._waiting.append((type(value), path))
        elif isinstance(value, Iterator):
            # A position cannot be put back, only seen to change.
            self.places.append(Place("", path, functools.partial(position, value), lambda _: None))

    def _visit_module(self, module: torch.nn.Module, path: str) -> None:
        own = vars(module)
        mine = is_users(type(module))
        names = [n for n in own if n not in _MODULE_BOOKS and (not n.startswith("_") or mine) and "_hooks" not in n]
        # torch's weight_norm, spectral_norm and pruning make `weight` anew from these before each forward pass.
        derived = [n for n in names if f"{n}_g" in module._parameters or f"{n}_orig" in module._parameters]
        for name in names:
            if name != "_buffers" and name not in derived:
                self._add(_place(path, own, name))
        for name in module._buffers:
            self.places.append(_place(path, module._buffers, name))
        if mine:
            self.mappings.append((path, own))
            self._waiting.append((type(module), path))
        hooks = [hook for name in _HOOKS for hook in (own.get(name) or {}).values()]
        for tensor in (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None):
            hooks += [h for name in _TENSOR_HOOKS for h in (getattr(tensor, name, None) or {}).values()]
        self._waiting += [(hook, _title(hook)) for hook in hooks]
        for name, child in module._modules.items():
            self._waiting.append((child, f"{path}.{name}"))

    def _visit_names(self, names: dict[str, Any], path: str, whole: bool = True) -> None:
        for name in [name for name in names if not str(name).startswith("__")]:
            self._add(_place(path, names, name))
        if whole:
            self.mappings.append((path, names))

    def _visit_slots(self, value: Any, path: str) -> None:
        for name in (name for name in slot_names(type(value)) if not name.startswith("__")):
            read = functools.partial(getattr, value, name, missing)
            # object's own, as a frozen dataclass refuses its own
            self._add(Place(path, name, read, functools.partial(_set_slot, value, name)))

    def _visit_function(self, function: Any, path: str) -> None:
        if isinstance(function, functools.partial):
            self._waiting += [(item, path) for item in (function.func, *function.args, *function.keywords.values())]
            return
        if isinstance(function, types.MethodType):
            self._waiting += [(function.__self__, _title(function.__self__)), (function.__func__, path)]
            return
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._waiting.append((wrapped, path))
        if file_owner(function.__code__.co_filename) != USER:
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add(_cell_place(name, cell))
        for name in sorted(variable_names(function.__code__)):
            if name in function.__globals__:
                self._add(_place("", function.__globals__, name))
        self._visit_names(vars(function), path)
        self._waiting += [
            (item, path) for item in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        ]

    def _visit_items(self, items: Any, path: str) -> None:
        if not isinstance(items, tuple):
            self.places.append(Place("", path, lambda: items, functools.partial(refill, items), content=True))
        values = list(items.items()) if isinstance(items, dict) else list(enumerate(items))
        for key, item in values[:_MOST_ITEMS]:
            self._waiting.append((item, f"{path}[{key!r}]"))

    def _visit_class(self, cls: type) -> None:
        if not is_users(cls):
            return
        for name, item in list(vars(cls).items()):
            if isinstance(item, types.FunctionType | staticmethod | classmethod | property):
                self._waiting.append((_function_of(item), f"{cls.__name__}.{name}"))
            elif not name.startswith("__"):
                read = functools.partial(getattr, cls, name, missing)
                self._add(Place(cls.__name__, name, read, functools.partial(setattr, cls, name)))

    def _add(self, place: Place) -> None:
        value = place.read()
        self.places.append(place)
        if not isinstance(value, SCALARS):
            self._waiting.append((value, str(place)))


def _place(owner: str, names: dict[Any, Any], name: Any) -> Place:
    def write(value: Any) -> None:
        if value is missing:
            names.pop(name, None)
        else:
            names[name] = value

    return Place(owner, str(name), lambda: names.get(name, missing), write)


def _items_at(place: Place, constants: set[Any]) -> list[Place]:
    """The items of a dict or a list under keys that the code has as constants: `config["scale"]`, `scale[0]`."""
    items = place.read()
    if isinstance(items, dict):
        return [_place(place.name, items, key) for key in items if isinstance(key, str | int) and key in constants]
    if not isinstance(items, list):
        return []
    indices = [i for i in constants if type(i) is int and 0 <= i < len(items)]
    return [Place(place.name, f"[{i}]", functools.partial(_item_of, items, i), lambda _: None) for i in indices]


def _item_of(items: list[Any], index: int) -> Any:
    return items[index] if index < len(items) else missing


def _cell_place(name: str, cell: types.CellType) -> Place:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not bound yet
            return missing

    def write(value: Any) -> None:
        if value is not missing:
            cell.cell_contents = value

    return Place("", name, read, write)


def _set_slot(value: Any, name: str, held: Any) -> None:
    if held is not missing:
        object.__setattr__(value, name, held)
    elif hasattr(value, name):
        object.__delattr__(value, name)


def is_users(cls: type) -> bool:
    """Whether a class is of the user's own code."""
    if cls.__module__ in ("builtins", "typing", "collections"):
        return False
    for item in vars(cls).values():
        function = _function_of(item)
        if isinstance(function, types.FunctionType):
            return file_owner(function.__code__.co_filename) == USER
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    return file is not None and file_owner(file) == USER


def _function_of(item: Any) -> Any:
    if isinstance(item, property):
        return item.fget
    return getattr(item, "__func__", item)


def _title(root: Any) -> str:
    return getattr(root, "__name__", None) or type(root).__name__


def host_tensor_places(reached: Reached) -> list[Place]:
    """Tensors in host memory, beside which there is a device: work on them is not in a graph."""
    found = [t for t in reached.objects if isinstance(t, torch.Tensor) and t.device.type == "cpu"]
    return [
        Place("host memory", f"a host tensor of shape {tuple(t.shape)}", functools.partial(_version, t), lambda _: None)
        for t in found
    ]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@functools.lru_cache(maxsize=4096)
def variable_names(code: types.CodeType) -> frozenset[str]:
    """Globals and closure variables that a function reads or binds, those of its inner functions included.

    `code.co_names` does not do: it holds attribute names too, and `optimizer.step` is no use of a global `step`.
    """
    found = {i.argval for i in dis.get_instructions(code) if i.opname.endswith(("_GLOBAL", "_NAME"))}
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(found.union(code.co_freevars, *(variable_names(constant) for constant in inner)))


@functools.lru_cache(maxsize=4096)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Attributes that a function reads."""
    loads = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in loads)


@functools.lru_cache(maxsize=4096)
def subscripts(code: types.CodeType) -> frozenset[Any]:
    """Texts and whole numbers in a function's code, which may be keys."""
    loads = ("LOAD_CONST", "LOAD_SMALL_INT")
    found = {i.argval for i in dis.get_instructions(code) if i.opname in loads and type(i.argval) in (str, int)}
    return frozenset(found)


@contextlib.contextmanager
def code_seen() -> Iterator[set[types.CodeType]]:
    """Collects the user's functions that run inside, on this thread."""
    seen: set[types.CodeType] = set()

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and file_owner(frame.f_code.co_filename) == USER:
            seen.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(before)
