"""Signals that Python handles, over a fork: the child gets the default back and loses none.

With a handler of Python's a child would live on in a long call of C, and Python forgets a signal that comes between the
fork and the child's first instruction: `worker.start(); worker.terminate()` would leave the worker running. So the
signals are held back over a fork. What a function around a fork raises is lost: a handler that raises asks
`around_fork`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

_get, _set = signal.getsignal, signal.signal  # theirs, whatever somebody shows in their place
_held = threading.local()  # the forking thread's mask from before the fork
_rules: list[tuple[tuple[signal.Signals, ...], Callable[[Any], bool]]] = []


def hold_over_forks(numbers: Sequence[signal.Signals], is_ours: Callable[[Any], bool]) -> None:
    """From now on for these signals, while `is_ours(handler)` holds: what a script's own handler raises would be lost.

    Once for each kind of handler: functions around a fork cannot be taken back.
    """
    if not _rules and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_let_go_in_child)
        os.register_at_fork(after_in_parent=_let_go)  # Ctrl-C may break the first off before it began
    _rules.append((tuple(numbers), is_ours))


def around_fork(frame: FrameType | None) -> bool:
    """Whether what runs at `frame` was called by a function around a fork."""
    while frame is not None:
        if frame.f_code in _AROUND_FORK:
            return True
        frame = frame.f_back
    return False


def _ours() -> list[signal.Signals]:
    return [number for numbers, is_ours in _rules for number in numbers if is_ours(_get(number))]


def _hold() -> None:
    ours = _ours()
    if ours:
        _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, ours)


def _let_go() -> None:
    mask = getattr(_held, "mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _held.mask = None


def _let_go_in_child() -> None:
    for number in _ours():
        _set(number, signal.SIG_DFL)
    _let_go()


_AROUND_FORK = frozenset({_hold.__code__, _let_go.__code__})
