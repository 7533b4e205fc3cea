"""A training step as it was given, checked to be something that runs when it is called."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from perfdoctor.errors import UsageError


def require_step(given: Any, who: str, what: str = "a function") -> None:
    """Raises UsageError for what cannot be called, or does nothing of its own when it is: a class, a generator."""
    if not callable(given):
        raise UsageError(f"{who} needs {what} as its first argument, got {type(given).__name__}")
    if isinstance(given, type):
        raise UsageError(f"{who} got the class {given.__name__}: pass a function, or an object of the class")
    inner = given.func if isinstance(given, functools.partial) else given
    for function in (inner, type(inner).__call__):
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            kind = "generator" if inspect.isgeneratorfunction(function) else "coroutine"
            raise UsageError(
                f"{who} got a {kind} function, which runs nothing when it is called: pass a plain function"
            )
