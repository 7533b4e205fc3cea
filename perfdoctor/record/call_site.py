"""From the Python stack at a call to its `Site`, and the log of calls that stalled the host.

Live hooks and the emulated device both write to a `HitLog`; sessions, guards and checkers read it. A site costs about
2 us once its stack is known: frames are told apart by (code, instruction), never by file and line text.
"""

from __future__ import annotations

import linecache
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import NamedTuple

from perfdoctor.record.capture import Frame, Site
from perfdoctor.record.instruction import executing_line
from perfdoctor.record.library_kinds import library_kind
from perfdoctor.record.owners import PERFDOCTOR, PYTHON, USER, file_owner, is_generated, package_path, shown_file

__all__ = ["Hit", "HitLog", "SiteTable", "library_kind", "own_frame", "user_frame"]

_UNKNOWN, _BASE, _SKIPPED, _LIBRARY, _USER, _NESTED, _GENERATED = range(-2, 5)
_HOOK_ROOMS = tuple(f"perfdoctor/{room}/" for room in ("record", "watch", "emulate", "trial", "doors"))
_SCRIPT_DOOR = "perfdoctor/doors/script.py"
_NESTED_NAMES = frozenset(("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>"))


class SiteTable:
    """Interns the sites of calls. `at` is safe from several threads."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self._by_stack: dict[tuple[int, ...], int] = {}
        self._by_site: dict[Site, int] = {}
        self._by_pair: dict[tuple[int, int, int, int], int] = {}  # where the two innermost frames tell the site
        self._roles: dict[int, int] = {}
        self._codes: list[CodeType] = []  # kept alive: their ids are keys
        self._lock = threading.Lock()

    def at(self, frame: FrameType | None) -> int:
        """The index in `sites` of a call whose innermost Python frame is `frame`."""
        if frame is not None and (outer := frame.f_back) is not None:
            index = self._by_pair.get((id(frame.f_code), frame.f_lasti, id(outer.f_code), outer.f_lasti))
            if index is not None:
                return index
        return self._walk(frame)

    def _walk(self, frame: FrameType | None) -> int:
        innermost = frame
        roles = self._roles
        key: list[int] = []
        frames: list[FrameType] = []
        wanted = 2  # the user's line and the user line that led to it; a comprehension is one line in two frames
        seen = 0
        while frame is not None:
            seen += 1
            code = frame.f_code
            role = roles.get(id(code), _UNKNOWN)
            if role < _SKIPPED:
                role = self._learn(code) if role == _UNKNOWN else role
                if role == _BASE:
                    break
            if role and (role >= _USER or not frames):
                key += (id(code), frame.f_lasti)
                frames.append(frame)
                if role in (_USER, _NESTED):
                    wanted -= role == _USER or len(frames) > 1
                    if not wanted:
                        break
            frame = frame.f_back
        index = self._by_stack.get(tuple(key))
        if index is None:
            index = self._intern(tuple(key), frames)
        if seen == 2 and innermost is not None and (outer := innermost.f_back) is not None:
            self._by_pair[id(innermost.f_code), innermost.f_lasti, id(outer.f_code), outer.f_lasti] = index
        return index

    def _learn(self, code: CodeType) -> int:
        role = _role(code)
        with self._lock:
            self._codes.append(code)
            self._roles[id(code)] = role
        return role

    def _intern(self, key: tuple[int, ...], frames: list[FrameType]) -> int:
        site = _site(frames)
        with self._lock:
            index = self._by_site.setdefault(site, len(self.sites))
            if index == len(self.sites):
                self.sites.append(site)
            self._by_stack[key] = index
        return index


class Hit(NamedTuple):
    """One call that stalled the host or crossed the border; `start_ns == end_ns` where only the moment is known."""

    kind: str  # a name of sync_kinds.KINDS
    site: int  # index into HitLog.sites.sites
    start_ns: int  # Unix time
    end_ns: int
    thread: int  # native id


_new_hit = tuple.__new__  # half the time of Hit(...), which unpacks its arguments in Python


class HitLog:
    """Hits in the order in which they came. A listener may raise: the error comes out at the call that was hit."""

    def __init__(self) -> None:
        self.hits: list[Hit] = []
        self.sites = SiteTable()
        self.listeners: list[Callable[[Hit], None]] = []
        self._native_ids: dict[int, int] = {}  # asking the kernel costs more than all the rest of a hit

    def add(self, kind: str, frame: FrameType | None, start_ns: int, end_ns: int) -> None:
        """Note a hit whose innermost Python frame is `frame`."""
        self.add_at(kind, self.sites.at(frame), start_ns, end_ns)

    def add_at(self, kind: str, site: int, start_ns: int, end_ns: int) -> None:
        """Note a hit at a site of `sites`, for a caller that has looked it up."""
        ident = threading.get_ident()
        thread = self._native_ids.get(ident)
        if thread is None:
            thread = self._native_ids[ident] = threading.get_native_id()
        hit = _new_hit(Hit, (kind, site, start_ns, end_ns, thread))
        self.hits.append(hit)
        for listener in self.listeners:
            listener(hit)


def own_frame(frame: FrameType) -> FrameType:
    """The innermost frame at or above `frame` that is not one of perfdoctor's hooks."""
    outer: FrameType | None = frame
    while outer is not None and _role(outer.f_code) == _SKIPPED:
        outer = outer.f_back
    return outer or frame


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's at or above `frame`, if possible one with a file; None where there is none."""
    generated: FrameType | None = None
    while frame is not None:
        role = _role(frame.f_code)
        if role in (_USER, _NESTED):
            return frame
        if role == _GENERATED:
            generated = generated or frame
        frame = None if role == _BASE else frame.f_back
    return generated


def _role(code: CodeType) -> int:
    file = code.co_filename
    owner = file_owner(file)
    if owner == USER:
        if is_generated(file):
            return _GENERATED
        return _NESTED if code.co_name in _NESTED_NAMES else _USER
    if owner == PERFDOCTOR:
        # Treatments and kernels are code that a loop calls, and may be guilty; the hooks themselves never are.
        path = package_path(file)
        if path == _SCRIPT_DOOR and code.co_name == "execute_program":
            return _BASE  # what called perfdoctor to run a script is no part of the script
        return _SKIPPED if path.startswith(_HOOK_ROOMS) else _LIBRARY
    if owner == PYTHON and file.rsplit("/", 1)[-1].rsplit("\\", 1)[-1] in ("warnings.py", "_py_warnings.py"):
        return _SKIPPED
    return _LIBRARY


def _describe(frame: FrameType) -> Frame:
    code = frame.f_code
    file = code.co_filename
    return Frame(file=shown_file(file), line=executing_line(frame), function=code.co_qualname, owner=file_owner(file))


def _site(stack: list[FrameType]) -> Site:
    if not stack:
        return Site(frame=Frame(file="<unknown>", line=0, function="", owner=PYTHON), exact=False)
    frames = [_describe(frame) for frame in stack]
    position = _users_line(frames)
    line = frames[position]
    libraries = [frame for frame in frames[:position] if frame.owner != USER]
    outer = [frame for frame in frames[position + 1 :] if (frame.file, frame.line) != (line.file, line.line)]
    written = [frame for frame in outer if not is_generated(frame.file)]
    return Site(
        frame=line,
        library=libraries[0] if libraries else None,
        caller=(written or outer)[0] if outer else None,
        text=linecache.getline(stack[position].f_code.co_filename, line.line).strip(),
    )


def _users_line(frames: list[Frame]) -> int:
    """Which of the frames the site is: the first that the user wrote; what `exec` made only where there is no other."""
    users = [index for index, frame in enumerate(frames) if frame.owner == USER]
    written = [index for index in users if not is_generated(frames[index].file)]
    return (written or users or [0])[0]
