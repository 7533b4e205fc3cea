"""Python source as a syntax tree."""

from __future__ import annotations

import ast
import functools
import linecache

# CPython 3.11 counts the depth of what it parses in one place: a parse in the midst of another one, from a finalizer
# or a thread in between, makes the outer one fail with "AST constructor recursion depth mismatch".
_TRIES = 5


def parsed(text: str) -> ast.Module | None:
    """The tree of a source; None where it is no Python."""
    for _ in range(_TRIES):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError):
            return None
        except SystemError:
            continue
    return None


def tree_of(file: str) -> ast.Module | None:
    """The tree of a file as its lines are now, kept for as long as they stay; None where there is no source."""
    return _kept("".join(linecache.getlines(file)))


_kept = functools.lru_cache(maxsize=64)(parsed)
