"""Hooks on the user's modules that go no further than those modules: a copy of the model has none that does anything.

Loops copy their model (the best one so far, a moving average) and save it whole. Torch copies a module's hooks with it,
so hooks that hold on to locks, threads or open ranges would end such a loop with an error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from perfdoctor.watch.patches import Patches


class ModuleHook:
    """Calls `hook`. Copied or pickled it is a function of the standard library that takes anything and gives None: the
    file of a saved model can be read where perfdoctor is not installed."""

    __slots__ = ("_hook",)

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


def keep_from_scripting(patches: Patches) -> None:
    """Let `torch.jit.script` see the modules without such hooks, which it would compile with them and cannot."""
    recursive: Any = torch.jit._recursive
    create = recursive.create_script_module

    @functools.wraps(create)
    def created(module: Any, *args: Any, **kwargs: Any) -> Any:
        with _lifted(module):
            return create(module, *args, **kwargs)

    patches.replace(recursive, "create_script_module", created)


@contextlib.contextmanager
def _lifted(module: Any) -> Iterator[None]:
    tables = [table for part in module.modules() for table in (part._forward_pre_hooks, part._forward_hooks)]
    kept = [(table, dict(table)) for table in tables if any(isinstance(hook, ModuleHook) for hook in table.values())]
    for table, hooks in kept:
        for key in [key for key, hook in hooks.items() if isinstance(hook, ModuleHook)]:
            del table[key]
    try:
        yield
    finally:
        for table, hooks in kept:  # in the order they had
            table.clear()
            table.update(hooks)
