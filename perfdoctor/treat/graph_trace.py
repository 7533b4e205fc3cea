"""One call of a step, watched line by line in the user's own code: which line changed what, and which calls it made."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

import torch

from perfdoctor.record.capture import Frame, Site
from perfdoctor.record.owners import USER, file_owner, package_path, shown_file
from perfdoctor.treat.graph_bindings import Bindings, Line
from perfdoctor.treat.graph_calls import WRAPPED, builtin_kind, library_kind
from perfdoctor.treat.graph_python_state import Change, Place
from perfdoctor.treat.graph_randomness import draw_kind, is_device_draw, is_torch_generator
from perfdoctor.treat.iterator_position import RUNNING, Position

__all__ = ["Line", "StepTrace", "pinning_threads", "site_at"]


@dataclass(slots=True)
class StepTrace:
    """What one call did. Lines are in the order in which they first ran."""

    watched: Sequence[Place] = ()
    bindings: Bindings = field(default_factory=Bindings)
    lines: dict[Line, int] = field(default_factory=dict)
    changes: list[tuple[Line, Change]] = field(default_factory=list)
    calls: list[tuple[Line, str, str]] = field(
        default_factory=list
    )  # kind (clock, print, log, warn, file, entropy, thread, ...), name
    shapes: dict[tuple[Line, str], list[tuple[int, ...]]] = field(default_factory=dict)  # of tensors in local variables
    _shown: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    _held: list[Any] = field(default_factory=list)
    _generators: list[int] = field(default_factory=list)  # torch's, among the watched
    _stack: list[tuple[FrameType, Line]] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[StepTrace]:
        """Watch this thread; the trace and profile functions of before are back afterwards."""
        before = sys.gettrace(), sys.getprofile()
        self._held = [place.held() for place in self.watched]
        self._generators = [i for i, place in enumerate(self.watched) if is_torch_generator(place)]
        self.bindings.begin()
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        try:
            yield self
        finally:
            sys.settrace(before[0])
            sys.setprofile(before[1])
            self._compare()
            self._stack.clear()
            self.bindings.end()

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if file_owner(frame.f_code.co_filename) != USER:
            return None
        self._compare()
        self._stack.append((frame, (frame.f_code, frame.f_lineno)))
        return self._local

    def _local(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event in ("line", "return"):
            self._compare(inside=event == "return" and bool(frame.f_code.co_flags & CO_GENERATOR))
            self._note_shapes(frame)
        if event == "line":
            line = (frame.f_code, frame.f_lineno)
            self.lines.setdefault(line, len(self.lines))
            if self._stack:
                self._stack[-1] = (frame, line)
        elif event == "return" and self._stack:
            self._stack.pop()
        return self._local

    def _compare(self, inside: bool = False) -> None:
        self.bindings.look(self._stack[-1][1] if self._stack else None)
        self._compare_places(range(len(self.watched)), inside)

    def _compare_places(self, indices: Sequence[int], inside: bool = False) -> None:
        for index in indices:
            place = self.watched[index]
            now = place.held()
            # The line that draws from a generator is told, not those inside it.
            if now is RUNNING or (inside and isinstance(now, Position)):
                continue
            if not place.same(self._held[index], now):
                if self._stack:
                    self.changes.append((self._stack[-1][1], Change(place, self._held[index], now)))
                self._held[index] = now

    def _note_shapes(self, frame: FrameType) -> None:
        if not self._stack:
            return
        line = self._stack[-1][1]
        for name, value in frame.f_locals.items():
            if isinstance(value, torch.Tensor):
                shape = tuple(value.shape)
                # The first line after which the variable holds this shape is the one that made it.
                if self._shown.get((id(frame), name)) != shape:
                    self._shown[id(frame), name] = shape
                    self.shapes.setdefault((line, name), []).append(shape)

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self._stack:
            return
        here, line = self._stack[-1]
        if self._generators and event in ("call", "return") and draw_kind(frame.f_code):
            if event == "return" and is_device_draw(frame):
                for index in self._generators:
                    self._held[index] = self.watched[index].held()
            else:
                self._compare_places(self._generators)
        if event == "c_call" and frame is here:
            kind = builtin_kind(arg)
            if kind:
                self.calls.append((line, kind, getattr(arg, "__qualname__", str(arg))))
        elif event == "call":
            kind = library_kind(frame.f_code)
            if kind and (frame.f_back is here or kind in WRAPPED):
                self.calls.append((line, kind, frame.f_code.co_qualname))
        elif event == "return" and frame.f_back is here and _copied_from_host(frame, arg):
            self.calls.append((line, "host-copy", frame.f_code.co_name))


def _copied_from_host(frame: FrameType, result: Any) -> bool:
    # On the emulated device `Tensor.to`, `.cuda` and their kin are Python functions: their frames show what moves.
    if not package_path(frame.f_code.co_filename).endswith("perfdoctor/emulate/transfers.py"):
        return False
    source = frame.f_locals.get("self")
    moved = isinstance(result, torch.Tensor) and result.is_cuda
    return moved and isinstance(source, torch.Tensor) and not source.is_cuda


def site_at(line: Line) -> Site:
    """The site of a line that ran."""
    code, number = line
    frame = Frame(file=shown_file(code.co_filename), line=number, function=code.co_qualname, owner=USER)
    return Site(frame=frame, text=linecache.getline(code.co_filename, number).strip())


def pinning_threads() -> list[str]:
    """Threads that pin a DataLoader's batches at this moment."""
    return [thread.name for thread in threading.enumerate() if "pin_memory" in thread.name]
