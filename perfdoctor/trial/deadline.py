"""The end of the time: a call that comes when it is over, in whatever the main thread does then.

A step may take as long as a compiler does: nothing at the end of a step would be in time.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from perfdoctor.watch.clocks import capturing

# Those that nobody sends to a training script; any that nobody handles will do.
_NUMBERS = tuple(getattr(signal, name) for name in ("SIGVTALRM", "SIGPROF", "SIGUSR2") if hasattr(signal, name))
_AGAIN_S = 0.05


class Deadline:
    """Calls `over()` once in the main thread when `until` (of time.perf_counter) is past, between two bytecodes.

    By a signal that nobody handles, handled while a deadline is set. In other threads there is only `past`. `over` may
    raise: it is not called where that would be lost (a `__del__`) or do harm: an import, whose half would be imported
    again, or the capture of a CUDA graph.
    """

    def __init__(self, over: Callable[[], None]) -> None:
        self.until = float("inf")
        self._over = over
        self._quiet: threading.Event | None = None  # what the thread that rings waits for; None: nobody rings
        self._number = signal.SIGINT  # the one taken
        self._ringing = threading.RLock()  # the handler stays until a signal that is under way has come

    @property
    def past(self) -> bool:
        return time.perf_counter() >= self.until

    def set(self, until: float) -> None:
        """From now on it is this one."""
        self.clear()
        self.until = until
        number = next((each for each in _NUMBERS if signal.getsignal(each) == signal.SIG_DFL), None)
        if number is None or not _in_main_thread():
            return
        self._number, self._quiet = number, threading.Event()
        signal.signal(number, self._rung)
        threading.Thread(target=self._ring, args=(self._quiet, until), daemon=True).start()

    def clear(self) -> None:
        """Nothing is called any more. Safe to call twice."""
        quiet, self._quiet = self._quiet, None
        if quiet is not None:
            quiet.set()
        with self._ringing:
            if _in_main_thread() and signal.getsignal(self._number) == self._rung:
                signal.signal(self._number, signal.SIG_DFL)

    def _ring(self, quiet: threading.Event, until: float) -> None:
        main, wait_s = threading.main_thread().ident, _AGAIN_S
        quiet.wait(max(until - time.perf_counter(), 0.0))
        while not quiet.is_set():
            with self._ringing:
                if main is not None and signal.getsignal(self._number) == self._rung:
                    signal.pthread_kill(main, self._number)
            quiet.wait(wait_s)
            wait_s *= 2  # few: each of them interrupts a system call

    def _rung(self, _: int, frame: FrameType | None) -> None:
        delicate = _is_delicate(frame) or ("torch" in sys.modules and capturing())
        if self._quiet is not None and self.past and not delicate:
            self._quiet.set()
            self._over()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_delicate(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
