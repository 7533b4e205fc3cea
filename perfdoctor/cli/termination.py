"""SIGTERM while a script runs under `perfdoctor run`: it ends as an exit with 143 does, and the report still comes.

A process that the script forks keeps the signal's default. Python forgets a signal that comes between the fork and the
child's first instruction, where it has a handler: `worker.start(); worker.terminate()` would leave the worker running.
So the signal is held back over a fork. What a function around a fork raises is lost: there the signal is sent again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_AGAIN_S = 0.01
_OF_WORKERS = "torch.utils.data._utils.signal_handling"
_held = threading.local()  # the forking thread's mask from before the fork
_handlers: list[Any] = []  # ours that are in place
_registered: list[bool] = []


@contextmanager
def ended_with_a_report(*, lasting: bool) -> Iterator[None]:
    """SIGTERM raises SystemExit(143) in the script, and leaves what comes behind the script alone.

    `lasting`: from then on the signal is ignored (torchrun gives a rank 30 s for its report); else a second one ends
    the process at once. One that was ignored before (`trap '' TERM`) stays so.
    """
    before = signal.getsignal(signal.SIGTERM)
    kept = before is None or (before is signal.SIG_IGN and not lasting)  # None: C code's, which cannot be put back
    if kept or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        if any(each.f_code in _AROUND_FORK for each in _frames(frame)):
            _send_again(number)
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN if lasting else signal.SIG_DFL)
        if any(each.f_code.co_name == "execute_program" for each in _frames(frame)):  # there is something to end
            _quiet_workers(quieted)
            raise SystemExit(128 + number)
        if not lasting:
            signal.raise_signal(number)

    quieted: list[Any] = []
    _hold_over_forks()
    _handlers.append(end)
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if quieted:
            signal.signal(signal.SIGCHLD, quieted[0])
        if end in _handlers:  # not in a process that the script forked, and that comes here as its parent does
            _handlers.remove(end)


def _quiet_workers(quieted: list[Any]) -> None:
    """A signal for the whole group (`timeout`, a batch system) ends DataLoader's workers too: torch must not raise over
    them in the middle of the report."""
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", "") == _OF_WORKERS:
        quieted.append(handler)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _send_again(number: int) -> None:
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


def _hold_over_forks() -> None:
    """Once a process: such functions cannot be taken back, and do nothing while no handler of ours is in place."""
    if not _registered:
        _registered.append(True)
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_let_go_in_child)
        os.register_at_fork(after_in_parent=_let_go)  # Ctrl-C may break the first off before it began


def _hold() -> None:
    if signal.getsignal(signal.SIGTERM) in _handlers:  # what the script's own handler raises would be lost
        _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_go() -> None:
    mask = getattr(_held, "mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _held.mask = None


def _let_go_in_child() -> None:
    if signal.getsignal(signal.SIGTERM) in _handlers:  # the script's own handler is the child's too
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _handlers.clear()
    _let_go()


_AROUND_FORK = frozenset({_hold.__code__, _let_go.__code__})
