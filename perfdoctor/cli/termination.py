"""SIGTERM while a script runs under `perfdoctor run`: it ends as an exit with 143 does, and the report still comes.

A process that the script forks keeps the signal's default (watch/forked_signals.py). What a function around a fork
raises is lost: there the signal is sent again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from perfdoctor.watch.forked_signals import around_fork, hold_over_forks

_AGAIN_S = 0.01
_OF_WORKERS = "torch.utils.data._utils.signal_handling"
_handlers: list[Any] = []  # ours that are in place


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
        if around_fork(frame):
            _send_again(number)
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN if lasting else signal.SIG_DFL)
        if any(each.f_code.co_name == "execute_program" for each in _frames(frame)):  # there is something to end
            _quiet_workers(quieted)
            raise SystemExit(128 + number)
        if not lasting:
            signal.raise_signal(number)

    quieted: list[Any] = []
    _handlers.append(end)
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if quieted:
            signal.signal(signal.SIGCHLD, quieted[0])
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


hold_over_forks((signal.SIGTERM,), lambda handler: handler in _handlers)
