"""Calls at chosen lines, handed to whoever neutralises them: the lines that findings name, by the same rule.

The line of a call is that of the innermost frame of the user's, libraries in between, as in `SiteTable`. Which line
that is, is kept for each instruction: a call then costs about 1 us here, hooked line or not, and the same in all arms.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from perfdoctor.record.capture import Site
from perfdoctor.record.owners import PERFDOCTOR, USER, file_owner, shown_file
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.tensor_method import TensorMethod

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Lines of a file, as `Frame.file` names it."""

    file: str
    first: int
    last: int

    @classmethod
    def of(cls, site: Site) -> Place:
        """The line of a site."""
        return cls(file=site.frame.file, first=site.frame.line, last=site.frame.line)

    def holds(self, file: str, line: int) -> bool:
        """Whether a line lies in it."""
        return self.first <= line <= self.last and self.file == file


def _classes_with(tensor: type, name: str) -> list[type]:
    """torch.Tensor and those of its subclasses that have a method `name` of their own."""
    found: list[type] = [tensor]
    waiting: list[type] = list(tensor.__subclasses__())
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if callable(vars(kind).get(name)) and kind not in found:
            found.append(kind)
    return found


class CallHooks:
    """Wrappers on functions and tensor methods. `install` once all handlers are named; `remove` takes all back."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._handlers: dict[tuple[int, str], tuple[Any, list[tuple[Place | None, Handler]]]] = {}
        self._local = threading.local()
        self._lines: dict[tuple[int, int], tuple[str, int]] = {}
        self._users: dict[int, bool | None] = {}  # code id -> the user's; None: ours, passed over
        self._codes: list[CodeType] = []  # kept alive: their ids are keys

    def add(self, owner: Any, name: str, place: Place | None, handler: Handler) -> None:
        """Hand calls of `owner.name` made at `place` (None: anywhere) to `handler(original, args, kwargs)`.

        A name that this torch does not have is left out.
        """
        if hasattr(owner, name):
            self._handlers.setdefault((id(owner), name), (owner, []))[1].append((place, handler))

    def install(self) -> None:
        """Replace everything that was named."""
        tensor = sys.modules["torch"].Tensor
        for (_, name), (owner, rows) in self._handlers.items():
            lookup = self._lookup(rows)
            original = getattr(owner, name)
            if owner is tensor:
                method = self._method(lookup)
                for kind in _classes_with(tensor, name):
                    self._patches.replace(kind, name, TensorMethod(getattr(kind, name), method))
            else:
                self._patches.replace(owner, name, self._function(original, lookup))

    def remove(self) -> None:
        """Put everything back."""
        self._patches.undo()

    def _method(self, lookup: Callable[[FrameType], Handler | None]) -> Callable[..., Any]:
        local, compiling = self._local, sys.modules["torch"].compiler.is_compiling

        def called(original: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(local, "inside", False) or compiling():
                return original(*args, **kwargs)
            handler = lookup(sys._getframe(2))
            return original(*args, **kwargs) if handler is None else self._handle(handler, original, args, kwargs)

        return called

    def _function(self, original: Any, lookup: Callable[[FrameType], Handler | None]) -> Callable[..., Any]:
        local, compiling = self._local, sys.modules["torch"].compiler.is_compiling

        @functools.wraps(original, updated=())
        def called(*args: Any, **kwargs: Any) -> Any:
            if getattr(local, "inside", False) or compiling():
                return original(*args, **kwargs)
            handler = lookup(sys._getframe(1))
            return original(*args, **kwargs) if handler is None else self._handle(handler, original, args, kwargs)

        return called

    def _handle(self, handler: Handler, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._local.inside = True  # what the original itself calls is part of it
        try:
            return handler(original, args, kwargs)
        finally:
            self._local.inside = False

    def _lookup(self, rows: list[tuple[Place | None, Handler]]) -> Callable[[FrameType], Handler | None]:
        known: dict[tuple[int, int], Handler | None] = {}

        def handler_at(frame: FrameType) -> Handler | None:
            at = self._frame(frame)
            key = (id(at.f_code), at.f_lasti)
            if key in known:
                return known[key]
            file, line = shown_file(at.f_code.co_filename), at.f_lineno or 0
            found = next((handler for place, handler in rows if place is None or place.holds(file, line)), None)
            self._codes.append(at.f_code)
            known[key] = found
            return found

        return handler_at

    def _frame(self, frame: FrameType) -> FrameType:
        """The innermost frame of the user's; of a library, where no user's frame led to it."""
        at: FrameType | None = frame
        innermost: FrameType | None = None
        while at is not None:
            code = at.f_code
            role = self._users.get(id(code), False)
            if role is False and id(code) not in self._users:
                role = self._learn(at)
            if role:
                return at
            if role is False and innermost is None:
                innermost = at
            at = at.f_back
        return innermost or frame

    def _learn(self, frame: FrameType) -> bool | None:
        owner = file_owner(frame.f_code.co_filename)
        role = None if owner == PERFDOCTOR else owner == USER
        self._codes.append(frame.f_code)
        self._users[id(frame.f_code)] = role
        return role
