"""Cleaning up where the process ends at once: SIGTERM or SIGHUP that nobody handles, and `os._exit`.

Python runs no `finally` then, nor exit functions. A clean-up runs all the same, and the process ends as it would have:
by the signal, or with the code given. A handler of the script's own is called as ever; the signal's default, set by the
script, stays ours. What no process can see, SIGKILL and a crash in C, leaves what is to be cleaned up.

A process that is forked gets the default back (watch/forked_signals.py).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from perfdoctor.watch.forked_signals import hold_over_forks
from perfdoctor.watch.patches import Patches

_get, _set = signal.getsignal, signal.signal  # theirs, whatever an outer block shows
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def cleaned_at_sudden_end(clean: Callable[[], None]) -> Iterator[None]:
    """In the block, `clean()` is called before this process, no child of it, ends at once. It must not raise.

    Blocks may be nested: the inner one's clean-up comes first. Signals are seen where the block is the main thread's.
    """
    end = _SuddenEnd(clean)
    try:
        end.install()
        yield
    finally:
        end.remove()


class _SuddenEnd:
    def __init__(self, clean: Callable[[], None]) -> None:
        self._clean = clean
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}
        self._patches = Patches()
        self._exit = os._exit

    def install(self) -> None:
        self._patches.replace(os, "_exit", self._leave)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = _get(number)
            # One that is ignored (nohup) or handled ends nobody: but for ours of an outer block.
            if before is signal.SIG_DFL or _is_ours(before):
                self._before[number] = before
                _set(number, self._received)
        asked = signal.getsignal
        self._patches.replace(signal, "signal", self._setting(signal.signal))
        self._patches.replace(signal, "getsignal", lambda number: self._shown(asked(number)))

    def remove(self) -> None:
        self._patches.undo()
        for number, before in self._before.items():
            if _get(number) == self._received:
                _set(number, before)
        self._before.clear()

    def _setting(self, original: Any) -> Any:
        """`signal.signal` under which the default of our signals is to clean up, and then the default."""

        def setting(number: Any, handler: Any) -> Any:
            ours = handler == signal.SIG_DFL and number in self._before and os.getpid() == self._owner
            return self._shown(original(number, self._received if ours else handler))

        return setting

    def _shown(self, handler: Any) -> Any:
        """What a script sees in place of ours: Lightning, say, looks whether a handler is set."""
        return signal.SIG_DFL if handler == self._received else handler

    def _received(self, number: int, _: Any) -> None:
        if os.getpid() != self._owner:  # a forked worker: it owns nothing of ours
            _set(number, signal.SIG_DFL)
        else:
            self._clean_once()
            _set(number, self._before.get(number, signal.SIG_DFL))
        os.kill(os.getpid(), number)

    def _leave(self, status: int) -> NoReturn:
        if os.getpid() == self._owner:
            self._clean_once()
        self._exit(status)

    def _clean_once(self) -> None:
        clean, self._clean = self._clean, lambda: None
        with suppress(Exception):
            clean()


def _is_ours(handler: Any) -> bool:
    return isinstance(getattr(handler, "__self__", None), _SuddenEnd)


hold_over_forks(_SIGNALS, _is_ours)
