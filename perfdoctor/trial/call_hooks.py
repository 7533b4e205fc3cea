"""Calls at chosen lines, handed to whoever neutralises them: the lines that findings name, by the same rule.

The line of a call is that of the innermost frame of the user's, libraries in between, as in `SiteTable`. Which line
that is, is kept for each instruction: a call then costs about 1 us here, hooked line or not, and the same in all arms.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from perfdoctor.record.capture import Site
from perfdoctor.record.owners import PERFDOCTOR, USER, file_owner, shown_file
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.tensor_method import TensorMethod

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_Lookup = Callable[[FrameType], Handler | None]
_Row = tuple["Place | None", Handler, int]


class _Inside(threading.local):
    inside = False  # in a handler: what the original itself calls is part of it


def _unused(original: Any, *_: Any) -> Any:
    raise AssertionError(original)


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


class _HookedMethod(TensorMethod):
    """A tensor method whose calls are looked at, in one frame: it is in the way of every call of that method."""

    def __init__(self, original: Any, hooks: CallHooks, lookup: _Lookup) -> None:
        super().__init__(original, _unused)
        self._hooks, self._lookup, self._local = hooks, lookup, hooks.local
        self._compiling: Callable[[], bool] = sys.modules["torch"].compiler.is_compiling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiling() or self._local.inside:
            return self.__wrapped__(*args, **kwargs)
        handler = self._lookup(sys._getframe(1))
        if handler is None:
            return self.__wrapped__(*args, **kwargs)
        return self._hooks.handle(handler, self.__wrapped__, args, kwargs)


class CallHooks:
    """Wrappers on functions and tensor methods. `install` once all handlers are named; `remove` takes all back.

    `group` marks the handlers that are added while it is set; `keep` leaves only the wrappers of some groups on.
    """

    def __init__(self) -> None:
        self.group: object = None
        self._handlers: dict[tuple[int, str], tuple[Any, list[_Row]]] = {}
        self._wrappers: list[tuple[Patches, list[_Row]]] = []
        self.reached: set[Place] = set()  # where a call was seen, in whatever thread
        self._answered: set[int] = set()  # lists of rows of which one had a call at its place
        self.local = _Inside()
        self._users: dict[int, bool | None] = {}  # code id -> the user's; None: ours, passed over
        self._codes: list[CodeType] = []  # kept alive: their ids are keys

    def add(self, owner: Any, name: str, place: Place | None, handler: Handler) -> None:
        """Hand calls of `owner.name` made at `place` (None: anywhere) to `handler(original, args, kwargs)`.

        A name that this torch does not have is left out.
        """
        if hasattr(owner, name):
            self._handlers.setdefault((id(owner), name), (owner, []))[1].append((place, handler, id(self.group)))

    def install(self) -> None:
        """Replace everything that was named."""
        tensor = sys.modules["torch"].Tensor
        for (_, name), (owner, rows) in self._handlers.items():
            lookup = self._lookup(rows)
            if owner is tensor:
                kinds = _classes_with(tensor, name)
                wrapped: list[tuple[Any, object]] = [
                    (kind, _HookedMethod(getattr(kind, name), self, lookup)) for kind in kinds
                ]
            else:
                original = getattr(owner, name)
                wrapped = [(owner, functools.wraps(original, updated=())(self.wrapped(original, lookup)))]
            for kind, wrapper in wrapped:
                patches = Patches()  # one for each: `keep` takes some back, and others may have patched meanwhile
                self._wrappers.append((patches, rows))
                patches.replace(kind, name, wrapper)

    def keep(self, groups: Iterable[object]) -> None:
        """Once it is known who calls what: leave on what these groups have answered, and what they asked everywhere.

        Each wrapper costs a microsecond or two in every call of its method, wherever it is made. From here on they stay
        as they are: what they cost is then the same with an arm and without it.
        """
        wanted = {id(group) for group in groups}
        for patches, rows in self._wrappers:
            if not any(group in wanted and (place is None or id(rows) in self._answered) for place, _, group in rows):
                patches.undo()

    def remove(self) -> None:
        """Put everything back."""
        for patches, _ in reversed(self._wrappers):
            patches.undo()
        self._wrappers.clear()

    def wrapped(self, original: Any, lookup: _Lookup) -> Callable[..., Any]:
        """`original`, its calls handed over where `lookup` finds a handler for the place of the call."""
        local, compiling, frame_of = self.local, sys.modules["torch"].compiler.is_compiling, sys._getframe

        def called(*args: Any, **kwargs: Any) -> Any:
            if compiling() or local.inside:
                return original(*args, **kwargs)
            handler = lookup(frame_of(1))
            return original(*args, **kwargs) if handler is None else self.handle(handler, original, args, kwargs)

        return called

    def handle(self, handler: Handler, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand one call over."""
        self.local.inside = True  # what the original itself calls is part of it
        try:
            return handler(original, args, kwargs)
        finally:
            self.local.inside = False

    def _lookup(self, rows: list[_Row]) -> _Lookup:
        known: dict[tuple[int, int], Handler | None] = {}
        users = self._users

        def handler_at(frame: FrameType) -> Handler | None:
            code = frame.f_code
            at = frame if users.get(id(code)) else self._frame(frame)
            key = (id(at.f_code), at.f_lasti)
            if key in known:
                return known[key]
            file, line = shown_file(at.f_code.co_filename), at.f_lineno or 0
            place, found = next((row[:2] for row in rows if row[0] is None or row[0].holds(file, line)), (None, None))
            self._codes.append(at.f_code)
            known[key] = found
            if found is not None:
                self._answered.add(id(rows))
            if place is not None:
                self.reached.add(place)
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
