"""Where an iterator stands: something that is another after it was drawn from.

Nothing is drawn to find out, and a position cannot be put back.
"""

from __future__ import annotations

import types
import warnings
from typing import Any

_NUMBERS = (type(None), bool, int, float, complex, str, bytes)
_MOST_PARTS = 16
_DEEPEST = 8


class Position(str):
    """A position as text, for comparison alone."""


RUNNING = Position("running")
"""a generator that is drawn from at this moment"""


def position(iterator: Any) -> Position | None:
    """Where a generator, or an iterator made in C (`itertools`, `iter(list)`, ...), stands; None where it hides that.

    A generator shows it by the instruction and its numbers, the others by what they would be pickled with.
    """
    if isinstance(iterator, types.GeneratorType):
        return RUNNING if iterator.gi_running else Position(_of_generator(iterator))
    found = _of(iterator, 0)
    return None if found is None else Position(found)


def _of_generator(generator: Any) -> str:
    frame = generator.gi_frame
    if frame is None:
        return "over"
    numbers = sorted((name, repr(v)) for name, v in frame.f_locals.items() if isinstance(v, _NUMBERS))
    return repr((frame.f_lasti, numbers))


def _of(iterator: Any, depth: int) -> str | None:
    if type(iterator).__module__ not in ("builtins", "itertools") or depth > _DEEPEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # itertools will not be pickled for ever
            parts = iterator.__reduce__()[1:]
    except Exception:
        return repr(iterator)  # count(3) shows it there too
    return repr([_part(part, depth + 1) for part in parts])


def _part(part: Any, depth: int) -> Any:
    """A short text; never the content of a list, which may be a data set."""
    if isinstance(part, _NUMBERS):
        return part
    if isinstance(part, tuple):
        return [_part(item, depth + 1) for item in part[:_MOST_PARTS]]
    if isinstance(part, types.GeneratorType):
        return _of_generator(part)
    if hasattr(part, "__next__"):
        return _of(part, depth)
    if isinstance(part, range):
        return repr(part)
    return len(part) if isinstance(part, list | dict | set) else type(part).__name__
