"""The end of a script from within: by an exception, raised again at once where the script catches it.

Some loops skip a bad batch with a bare `except:`. The first exception is raised once, at the end of a step. Where
another step comes, the script has caught it: then its frames are traced, and each line of an `except` raises it again.
Lines of `finally` and `with` run, unless that was in vain, too (a `return` or `continue` in a `finally`).
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from perfdoctor.errors import INTERRUPTED
from perfdoctor.record.owners import PERFDOCTOR, PYTHON, TORCH, file_owner
from perfdoctor.trial.deadline import Deadline
from perfdoctor.watch.patches import Patches

_GRACE_S = 10.0  # for what a script does at its end, until it is taken to have caught what ends it
_SPARING = 4  # times; then a line is a line
_SPARED = frozenset({PERFDOCTOR, PYTHON, TORCH})  # whose frames are never traced


class ScriptStopped(BaseException):
    """Ends a script that has been watched for long enough. Not an Exception, so that `except Exception` lets it
    through; `finally` blocks and atexit functions run."""


class ScriptStop:
    """Call it to end the script that `run` runs. Called again, it ends one that has caught that.

    With `throw_away`, for a run that keeps nothing: `os._exit` of this process's main thread ends the script like an
    exception; a KeyboardInterrupt that the script catches is noted in `interrupted`; a script that goes on without
    another step is ended again and again. The script's own handler of SIGINT gets the first one, not the second.
    The trace function of before, a debugger's or coverage's, is back afterwards.
    """

    def __init__(self, *, throw_away: bool) -> None:
        self.asked = False  # to stop, on purpose
        self.interrupted = False
        self.status: int | None = None  # given to os._exit
        self._armed = False  # whether frames are traced
        self._throw_away = throw_away
        self._owner = os.getpid()
        self._running = False
        self._times = self._num_interrupts = 0
        self._again = Deadline(self)
        self._patches = Patches()
        self._theirs: Any = None  # the script's handler of SIGINT; None: nobody's
        self._tracing: Any = None
        self._traced: list[tuple[FrameType, Any]] = []

    @property
    def _is_ours(self) -> bool:
        """Whether the script runs, in this process and not in a fork of it."""
        return self._running and os.getpid() == self._owner

    @property
    def armed(self) -> bool:
        """Whether frames are traced, in this process and not in a fork of it."""
        return self._armed and os.getpid() == self._owner

    @property
    def sparing(self) -> bool:
        """Whether lines that are not part of an `except` are left alone."""
        return self._times < _SPARING

    def run(self, execute: Callable[[], tuple[int, bool]]) -> tuple[int, bool]:
        """`execute()`: the exit code, and whether the script was stopped on purpose; as it really ended.

        What a script makes of its stop (`except BaseException: sys.exit(1)`) is no failure of its own.
        """
        code, stopped = 0, True
        _handlers.cache_clear()  # a file of the same name may have been another
        try:
            with suppress(ScriptStopped):  # of a signal that comes when the script has just ended
                self._install()
                code, stopped = next(_apart(execute))
        finally:
            self._remove()
        if self.interrupted:
            return INTERRUPTED, False
        if self.asked:
            return 0, stopped or code != 0 or self.status is not None
        return (code, stopped) if self.status is None else (self.status, False)

    def __call__(self) -> None:
        """Raises ScriptStopped; nothing where the script is over."""
        if not self._is_ours:
            return
        self.asked = self.asked or not (self.interrupted or self.status is not None)
        self._times += 1
        if self._times > 1 or self.interrupted:
            self._trace()
        self._look_again()
        raise ScriptStopped

    def check(self) -> None:
        """At the end of a step: a script that has caught its KeyboardInterrupt, or its os._exit, ends here."""
        if self.interrupted or self.status is not None:
            self()

    def _install(self) -> None:
        self._running, self._tracing = True, sys.gettrace()
        if not self._throw_away:
            return
        self._patches.replace(os, "_exit", self._leaving(os._exit))
        self._patches.replace(sys, "excepthook", self._showing(sys.excepthook))
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._theirs = signal.default_int_handler
            signal.signal(signal.SIGINT, self._received)
            asked = signal.getsignal
            self._patches.replace(signal, "signal", self._setting(signal.signal))
            self._patches.replace(signal, "getsignal", lambda signalnum: self._shown(asked(signalnum)))

    def _remove(self) -> None:
        self._running = False
        self._again.clear()
        self._patches.undo()
        if self._theirs is not None and signal.getsignal(signal.SIGINT) == self._received:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._armed:
            self._armed = False
            sys.settrace(self._tracing)
        for frame, before in self._traced:
            frame.f_trace = before
        self._traced.clear()
        self._tracing = None

    def _look_again(self) -> None:
        if self._throw_away:
            self._again.set(time.perf_counter() + _GRACE_S)

    def _trace(self) -> None:
        """From now on each line of an `except` of the script's raises ScriptStopped, in this thread."""
        self._armed = True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not _runs_the_script(frame):
            if file_owner(frame.f_code.co_filename) not in _SPARED and not isinstance(frame.f_trace, _Line):
                self._traced.append((frame, frame.f_trace))
                frame.f_trace = _Line(self, frame)
            frame = frame.f_back
        sys.settrace(_new_frame)

    def _leaving(self, leave: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
        def leaving(status: int) -> NoReturn:
            ours = self._is_ours
            if ours and threading.current_thread() is threading.main_thread():
                self.status = status
                self()
            elif ours:
                said = f"perfdoctor: the script left by os._exit({status}) in a thread: nothing can be reported\n"
                os.write(2, said.encode())
            leave(status)

        return leaving

    def _showing(self, show: Callable[..., Any]) -> Callable[..., Any]:
        """`sys.excepthook` that is silent about what a script makes of its stop."""

        def showing(*error: Any) -> Any:
            return None if self.asked else show(*error)

        return showing

    def _setting(self, original: Any) -> Any:
        """`signal.signal` under which a handler of SIGINT is called by ours."""

        def setting(signalnum: Any, handler: Any) -> Any:
            before = self._shown(original(signalnum, handler))
            if signalnum == signal.SIGINT and os.getpid() == self._owner:
                self._theirs = handler
                original(signalnum, self._received)
            return before

        return setting

    def _shown(self, handler: Any) -> Any:
        return self._theirs if handler == self._received else handler

    def _received(self, number: int, frame: FrameType | None) -> None:
        ours = self._is_ours
        self._num_interrupts += ours
        try:
            if self._theirs == signal.SIG_DFL or (ours and self._num_interrupts > 1):
                raise KeyboardInterrupt
            if callable(self._theirs):
                self._theirs(number, frame)
        except KeyboardInterrupt:
            if ours:
                self.interrupted = True
                if self._num_interrupts > 1:
                    self._trace()
                self._look_again()
            raise


class _Line:
    """The trace function of one frame. Python forgets a trace function that raises: this one is put back by its end.

    Nothing else may refer to it. So it is deleted where it is forgotten: before the exception reaches any `except`.
    """

    __slots__ = ("_frame", "_stop")

    def __init__(self, stop: ScriptStop, frame: FrameType) -> None:
        self._stop, self._frame = stop, frame

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._stop.armed:
            return None
        if event != "line" or (self._stop.sparing and not _is_in_handler(frame)):
            return self
        del self, frame, arg  # the traceback keeps them
        raise ScriptStopped

    def __del__(self) -> None:
        if self._stop.armed and self._frame.f_trace is None:
            self._frame.f_trace = _Line(self._stop, self._frame)
            sys.settrace(_new_frame)


def _apart(execute: Callable[[], tuple[int, bool]]) -> Iterator[tuple[int, bool]]:
    """A generator has a stack of handled exceptions of its own, which goes with it.

    A line of a `with` that raises after its `__exit__` has swallowed one leaves that one on the stack: to Python such
    a line cannot raise. Outside, it would be the context of all that is raised later, and keep its frames.
    """
    yield execute()


def _new_frame(frame: FrameType, event: str, arg: Any) -> None:
    """A frame that begins later is traced at the next step, if there is one."""


def _runs_the_script(frame: FrameType) -> bool:
    return frame.f_code.co_name == "execute_program" and file_owner(frame.f_code.co_filename) == PERFDOCTOR


def _is_in_handler(frame: FrameType) -> bool:
    lines = _handlers(frame.f_code.co_filename)
    return lines is None or frame.f_lineno in lines


@functools.lru_cache(maxsize=64)
def _handlers(file: str) -> frozenset[int] | None:
    """The lines of each `except` of a file; None where its source is not known."""
    source = "".join(linecache.getlines(file))
    try:
        return frozenset(_lines(ast.parse(source), inside=False)) if source else None
    except (SyntaxError, ValueError):
        return None


def _lines(node: ast.AST, *, inside: bool) -> Iterator[int]:
    """Lines `inside` an `except`, but for what stands in a `finally` or in a function there."""
    if isinstance(node, ast.ExceptHandler):
        inside = True
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        inside = False
    if inside and isinstance(node, (ast.stmt, ast.ExceptHandler)):
        last = node.lineno if hasattr(node, "body") else node.end_lineno  # of one with a body, its head
        yield from range(node.lineno, (last or node.lineno) + 1)
    finals = getattr(node, "finalbody", [])
    for child in ast.iter_child_nodes(node):
        yield from _lines(child, inside=inside and child not in finals)
