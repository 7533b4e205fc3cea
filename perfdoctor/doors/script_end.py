"""The end of a throw-away script: what an interpreter does when a script is over, while its files are still redirected.

A script's exit functions, its threads and its pools may write; after the trial they would write to the real files.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from perfdoctor.record.owners import PERFDOCTOR, PYTHON, TORCH, file_owner
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.thread_frames import frame_of

_MOST_SECONDS = 5.0  # that threads are waited for; one that goes on is kept from the user's files (sandbox_audit.py)
# Exit functions that these register end something that the process still needs.
_OUTLIVE = frozenset({PERFDOCTOR, PYTHON, TORCH})

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@contextmanager
def ended_inside(left: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """At the end of the block: wait for the script's threads, then call its exit functions, the last one first.

    None of it after `os._exit`, be it the script's (`left()`) or that of an exit function, which ends nothing else.
    """
    threads, children = set(threading.enumerate()), set(active_children())
    finalizers = set(_finalizers())
    calls: list[_Call] = []
    patches = Patches()
    patches.replace(atexit, "register", _noting(calls, atexit.register))
    patches.replace(atexit, "unregister", _forgetting(calls, atexit.unregister))
    leave = _Leave(os._exit)
    patches.replace(os, "_exit", leave)  # now: the script may keep it for its end, `atexit.register(os._exit, 0)`
    try:
        yield
    finally:
        try:
            if not left():
                leave.ending = True
                with suppress(_Left):
                    _end(threads, children, finalizers, calls)
        finally:
            leave.ending = False
            patches.undo()


class _Left(BaseException):
    """An exit function has called `os._exit`: the script is over, this process is not."""


class _Leave:
    """`os._exit`, which ends the exit functions only while they run (`ending`), in this process's main thread."""

    def __init__(self, leave: Callable[[int], NoReturn]) -> None:
        self.ending = False
        self._leave = leave
        self._owner = os.getpid()

    def __call__(self, status: int) -> NoReturn:
        here = os.getpid() == self._owner and threading.current_thread() is threading.main_thread()
        if self.ending and here:
            raise _Left
        self._leave(status)


def _end(threads: set[threading.Thread], children: set[BaseProcess], finalizers: set[Any], calls: list[_Call]) -> None:
    _await(threads, children)
    while calls:
        function, args, kwargs = calls.pop()
        _call(function, args, kwargs)
    for finalizer in [each for each in _finalizers() if each not in finalizers]:
        _call(finalizer, (), {})


def _noting(calls: list[_Call], register: Callable[..., Any]) -> Callable[..., Any]:
    def noted(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if file_owner(sys._getframe(1).f_code.co_filename) in _OUTLIVE:
            return register(function, *args, **kwargs)
        if not callable(function):
            raise TypeError("the first argument must be callable")
        calls.append((function, args, kwargs))
        return function

    return noted


def _forgetting(calls: list[_Call], unregister: Callable[..., Any]) -> Callable[..., Any]:
    def forgotten(function: Callable[..., Any], /) -> None:
        calls[:] = [call for call in calls if call[0] != function]
        unregister(function)

    return forgotten


def _finalizers() -> list[weakref.finalize[Any, Any]]:
    """Those that are called at the end of the process and that are the script's, the last one first."""
    kind: Any = weakref.finalize
    found = [(each, row) for each, row in list(kind._registry.items()) if row.atexit]
    found.sort(key=lambda pair: -pair[1].index)
    return [each for each, row in found if _file_of(row.func) and file_owner(_file_of(row.func)) not in _OUTLIVE]


def _file_of(function: Any) -> str:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return str(code.co_filename) if code is not None else ""


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """One that fails is told as the interpreter tells it, and keeps no other from being called."""
    try:
        function(*args, **kwargs)
    except SystemExit:
        pass
    except Exception:
        print(f"Exception ignored in atexit callback: {function!r}", file=sys.stderr)
        traceback.print_exc()


def _await(known: set[threading.Thread], children: set[BaseProcess]) -> None:
    """Wait for what the interpreter would wait for: threads, processes, and work that was handed to pools.

    A process that does not end in time is ended: the files that it would write to are gone by then.
    """
    end = time.monotonic() + _MOST_SECONDS

    def left() -> list[BaseProcess]:
        pools = {pid for each in threading.enumerate() for pid in getattr(each, "processes", None) or ()}
        found = [each for each in active_children() if each not in children and each.pid not in pools]
        return [each for each in found if not each.daemon]

    while any(_is_busy(each) for each in threading.enumerate() if each not in known) or left():
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    for process in left():
        process.terminate()
        process.join(1.0)


def _is_busy(thread: threading.Thread) -> bool:
    if thread.daemon or thread is threading.current_thread():
        return False
    pending = getattr(thread, "pending_work_items", None)  # of the thread that serves a pool of processes
    if pending is not None:
        return bool(pending)
    frame = frame_of(thread.ident or 0)
    idle = frame is not None and frame.f_code.co_name == "_worker"  # of a pool of threads: it waits for work
    return not (idle and file_owner(frame.f_code.co_filename) == PYTHON)  # type: ignore[union-attr]
