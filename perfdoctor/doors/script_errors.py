"""What a script died of, caught on its way to the screen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def caught_errors(silent: Callable[[], bool] = lambda: False) -> Iterator[list[BaseException]]:
    """The errors that ended the script; they are printed as ever, unless `silent()`: then somebody else tells them."""
    errors: list[BaseException] = []
    before: Callable[..., Any] = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        errors.append(error)
        if silent():
            return
        before(kind, error.with_traceback(trace), trace)  # sys.__excepthook__ shows what the error itself carries

    sys.excepthook = hook
    try:
        yield errors
    finally:
        if sys.excepthook is hook:
            sys.excepthook = before
