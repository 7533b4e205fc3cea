"""Which of some lines a loop runs, by Python's own tracing, until all of them have run or it is told to stop.

A line that the trial sees no call of may not have run at all: in a validation behind the epoch, say. Calls that trace
cost a microsecond or so, for the steps that are looked at; none of those is timed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

from perfdoctor.record.owners import shown_file
from perfdoctor.trial.call_hooks import Place


class ReachedLines:
    """`install` in the thread that runs the lines, below their frames; `remove` there, too. Safe to call twice.

    Where somebody traces already, a debugger or a measurement of coverage, nothing is known.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._missing = set(places)
        self._known = False  # looked, or still looking
        self._thread = self._owner = 0
        self._frames: list[FrameType] = []
        # Wanted, by the id of the code that they lie in, which is kept alive: equal code may lie in several files.
        self._lines: dict[int, tuple[CodeType, dict[int, list[Place]]]] = {}

    def missing(self, place: Place) -> bool:
        """Whether a line has not run, for sure."""
        return self._known and place in self._missing

    @property
    def waiting(self) -> bool:
        """Whether a line has not run yet."""
        return self._known and bool(self._missing)

    def install(self) -> None:
        """From now on. Frames that run already are traced from their next line on."""
        if not self._missing or sys.gettrace() is not None:
            return
        self._known, self._thread, self._owner = True, threading.get_ident(), os.getpid()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_trace is None and self._wanted(frame.f_code):
                frame.f_trace = self._line
                self._frames.append(frame)
            frame = frame.f_back
        sys.settrace(self._called)

    def remove(self) -> None:
        """Trace no more."""
        if self._thread != threading.get_ident():
            return
        self._owner = 0  # for whoever puts back later what traced while he did not want it
        if sys.gettrace() == self._called:
            sys.settrace(None)
        for frame in self._frames:
            if frame.f_trace == self._line:
                frame.f_trace = None
        self._frames.clear()

    def _wanted(self, code: CodeType) -> dict[int, list[Place]]:
        known = self._lines.get(id(code))
        if known is None:
            file = shown_file(code.co_filename)
            here = [place for place in self._missing if place.file == file]
            lines = {line for _, _, line in code.co_lines() if line is not None} if here else set()
            found = {line: held for line in lines if (held := [each for each in here if each.holds(file, line)])}
            known = self._lines[id(code)] = (code, found)
        return known[1]

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        if os.getpid() != self._owner:  # a worker that was forked meanwhile, or over
            sys.settrace(None)
            return None
        if not self._wanted(frame.f_code):
            return None
        self._note(frame)
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        self._note(frame)
        return self._line

    def _note(self, frame: FrameType) -> None:
        for place in self._wanted(frame.f_code).get(frame.f_lineno, ()):
            self._missing.discard(place)
        if not self._missing:
            self.remove()
