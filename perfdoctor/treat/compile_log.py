"""What torch.compile does while it traces: graph breaks, recompilations and compile time, as they happen.

Three seams of dynamo that exist from torch 2.6 on are listened at while a `CompileLog` is open: the logger object it
reports graph breaks to, the function that finds the guard that failed, and the one that decides whether the limit of
recompilations is reached. They run at compile time only: a compiled call that finds its code costs nothing more. No
level, handler or setting of logging or dynamo is changed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from types import FrameType, TracebackType
from typing import Any

from perfdoctor.record.call_site import user_frame
from perfdoctor.record.capture import Frame
from perfdoctor.record.owners import PERFDOCTOR, TORCH, file_owner, shown_file
from perfdoctor.treat.graph_break_reasons import GraphBreak, parse_break
from perfdoctor.treat.recompilations import Recompilation, explain_guard, first_guard
from perfdoctor.watch.patches import Patches

_LIMITS = ("exceeds_recompile_limit", "exceeds_cache_size_limit")  # the same, renamed in torch 2.6 or 2.7


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """One failed guard: which function compiled again, at which call of the log's `call_index`."""

    function: Frame
    call: Frame | None
    guard: str
    at_call: int


class CompileLog:
    """Listens to torch.compile for the time of a `with` block. Several may be open at once, and nest.

    `breaks` and `recompilations()` hold what came, in order, each place once. `only_thread` (an ident) leaves out what
    other threads compile. `call_index` is set by the owner before each call that it makes.
    """

    def __init__(self, *, only_thread: int | None = None, outside: FrameType | None = None) -> None:
        self.breaks: list[GraphBreak] = []
        self.call_index = 0
        self.listening = True  # the owner of a log that stays open switches it on around its own calls
        self.num_compiled = 0  # frames that dynamo tried to compile
        self.compile_ns = 0  # forward and backward, in all threads
        self._only_thread = only_thread
        self._outside = None if outside is None else (outside.f_code, outside.f_lineno)  # whose line is no call
        self._failures: list[_Failure] = []
        self._limits: set[tuple[str, int]] = set()

    def __enter__(self) -> CompileLog:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Start to listen. Imports torch's compiler, about a second the first time."""
        _SEAMS.add(self)

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        _SEAMS.remove(self)

    def recompilations(self) -> tuple[Recompilation, ...]:
        """One for each (function, kind of guard), with how often and at which calls."""
        groups: dict[tuple[str, int, str], list[_Failure]] = {}
        for failure in self._failures:
            what = explain_guard(failure.guard)
            groups.setdefault((failure.function.file, failure.function.line, what.kind), []).append(failure)
        return tuple(self._recompilation(kind, failures) for (_, _, kind), failures in groups.items())

    def _recompilation(self, kind: str, failures: list[_Failure]) -> Recompilation:
        first = failures[0]
        what = explain_guard(first.guard)
        return Recompilation(
            function=first.function,
            call=first.call,
            kind=kind,
            guard=first.guard,
            reason=what.reason,
            change=what.change,
            count=len(failures),
            at_calls=tuple(dict.fromkeys(failure.at_call for failure in failures)),
            limit_hit=(first.function.file, first.function.line) in self._limits,
        )

    def add_break(self, text: str) -> None:
        """Note a graph break from dynamo's own text; a place is listed once."""
        found = self._mine() and parse_break(text)
        if found and (found.site, found.kind) not in {(known.site, known.kind) for known in self.breaks}:
            self.breaks.append(found)

    def _mine(self) -> bool:
        return self.listening and self._only_thread in (None, threading.get_ident())

    def add_failure(self, frame: Any, reasons: list[str], caller: FrameType | None) -> None:
        """Note that `frame` is compiled again, called by the user's frame `caller`."""
        guard = first_guard(reasons)
        if frame is None or guard is None or not self._mine():
            return
        call = _frame(caller.f_code, caller.f_lineno) if caller is not None else None
        function = _frame(frame.f_code, frame.f_code.co_firstlineno)
        # A module's call, which torch or compile_model wraps in a function of its own.
        if function.owner in (TORCH, PERFDOCTOR) and call is not None:
            function = replace(call, function="the compiled module")
        elif caller is not None and (caller.f_code, caller.f_lineno) == self._outside:
            call = None
        self._failures.append(_Failure(function=function, call=call, guard=guard, at_call=self.call_index))

    @property
    def limit_hit(self) -> bool:
        """Whether any function reached its limit of recompilations."""
        return bool(self._limits)

    def add_attempt(self, *, limit_hit: bool) -> None:
        """Note that a frame is about to be compiled, or that the limit forbids it."""
        if not self._mine():
            return
        self.num_compiled += 1
        if limit_hit and self._failures:
            function = self._failures[-1].function
            self._limits.add((function.file, function.line))


class _Seams:
    """The places in dynamo that are listened at, replaced while any log is open."""

    def __init__(self) -> None:
        self.logs: list[CompileLog] = []
        self._patches = Patches()
        self._lock = threading.Lock()
        self._started_ns: int | None = None

    def add(self, log: CompileLog) -> None:
        with self._lock:
            if not self.logs:
                try:
                    self._install()
                except BaseException:
                    self._uninstall()
                    raise
            else:
                self._time_compilations()
            self.logs.append(log)

    def remove(self, log: CompileLog) -> None:
        with self._lock:
            if log in self.logs:
                self.logs.remove(log)
                if not self.logs:
                    self._uninstall()

    def _install(self) -> None:
        convert = import_module("torch._dynamo.convert_frame")
        symbolic = import_module("torch._dynamo.symbolic_convert")
        replacements: list[tuple[Any, str, Callable[[Any], object]]] = [
            (symbolic, "graph_break_log", _BreakLogger),
            (convert, "graph_break_log", _BreakLogger),
            # torch reports a place once in a process; its memory of them stays as it was.
            (symbolic, "graph_break_dup_warning_checker", lambda _: _NothingSeen()),
            (convert, "get_and_maybe_log_recompilation_reasons", self._guards),
            *((convert, name, self._limit) for name in _LIMITS),
        ]
        for module, name, replacement in replacements:
            if hasattr(module, name):
                self._patches.replace(module, name, replacement(getattr(module, name)))
        self._time_compilations()

    def _time_compilations(self) -> None:
        """torch._dynamo.reset() drops every callback, also while a log is open."""
        calls = import_module("torch._dynamo.callback").callback_handler
        if self._start not in calls.start_callbacks:
            calls.register_start_callback(self._start)
            calls.register_end_callback(self._end)

    def _uninstall(self) -> None:
        self._patches.undo()
        calls = import_module("torch._dynamo.callback").callback_handler
        for registered, callback in ((calls.start_callbacks, self._start), (calls.end_callbacks, self._end)):
            if callback in registered:
                registered.remove(callback)

    def _guards(self, original: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def reasons(*args: Any, **kwargs: Any) -> list[str]:
            found = original(*args, **kwargs)
            if not kwargs.get("skip_logging"):
                frame = kwargs.get("frame", args[1] if len(args) > 1 else None)
                caller = user_frame(sys._getframe(1))
                for log in tuple(self.logs):
                    log.add_failure(frame, found, caller)
            return found

        return reasons

    def _limit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def exceeds(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            self._time_compilations()
            for log in tuple(self.logs):
                log.add_attempt(limit_hit=bool(found[0]))
            return found

        return exceeds

    def _start(self, *_: Any) -> None:
        self._started_ns = time.perf_counter_ns()

    def _end(self, *_: Any) -> None:
        if self._started_ns is not None:
            for log in tuple(self.logs):
                log.compile_ns += time.perf_counter_ns() - self._started_ns
            self._started_ns = None


_SEAMS = _Seams()


class _BreakLogger:
    """In place of dynamo's graph-break logger: hands each text on, to us and then to the logger as it is set."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def isEnabledFor(self, level: int) -> bool:
        return True

    def debug(self, message: str, *args: Any, **kwargs: Any) -> None:
        for log in tuple(_SEAMS.logs):
            log.add_break(message % args if args else message)
        if self._logger.isEnabledFor(10):
            self._logger.debug(message, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)


class _NothingSeen:
    """In place of dynamo's set of places that it has reported already."""

    def add(self, *_: object) -> bool:
        return True

    def reset(self) -> None:
        """Nothing is kept."""


def _frame(code: Any, line: int) -> Frame:
    file = code.co_filename
    return Frame(file=shown_file(file), line=line, function=code.co_qualname, owner=file_owner(file))
