"""Settings that a script switches on where there is a GPU, looked at on a machine without one.

torch itself switches a GradScaler off there; `pin_memory=device == "cuda"` is the script's own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from perfdoctor.treat.graph_sources import NameSpace, names_of, syntax_tree
from perfdoctor.treat.loop_writes import resolved


@contextmanager
def scalers_on(scalers: Iterable[Any], spaces: list[NameSpace]) -> Iterator[None]:
    """Inside, with the emulated device open, those that only lack a GPU are new and enabled; afterwards as before."""
    lacking = [s for s in scalers if not s.is_enabled() and s._device == "cuda"]
    kept = [(s, dict(vars(s))) for s in lacking if on_with_a_gpu(s, "enabled", spaces, default=True)]
    try:
        for scaler, _ in kept:
            torch.amp.GradScaler.__init__(scaler, "cuda")
        yield
    finally:
        for scaler, held in kept:
            vars(scaler).clear()
            vars(scaler).update(held)


def on_with_a_gpu(value: Any, setting: str, spaces: list[NameSpace], *, default: bool) -> bool:
    """Whether the call that built `value` asks for `setting` where there is a GPU, as far as its source tells."""
    return any(_asks(call, setting, spaces, default) for call in _calls(value, spaces))


def _calls(value: Any, spaces: list[NameSpace]) -> Iterator[ast.Call]:
    """Calls that built it: `name = Class(...)` for a name that it is bound to."""
    for space in spaces:
        names = names_of(value, space)
        for node in ast.walk(syntax_tree(space.file)):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and space.first <= node.lineno <= space.last
            ):
                targets = {getattr(t, "id", getattr(t, "attr", None)) for t in node.targets}
                if targets & names and ast.unparse(node.value.func).endswith(type(value).__name__):
                    yield node.value


def _asks(call: ast.Call, setting: str, spaces: list[NameSpace], default: bool) -> bool:
    given = next((keyword.value for keyword in call.keywords if keyword.arg == setting), None)
    if given is None:
        return default
    value = given.value if isinstance(given, ast.Constant) else resolved(given, spaces)
    # `device == "cuda"`, `torch.cuda.is_available()`
    return value is True or (not isinstance(given, ast.Constant | ast.Name) and "cuda" in ast.unparse(given))
