"""One line on standard error that says how far a run is, for whoever waits in front of it.

On a terminal it is rewritten in place, elsewhere a line comes every ten seconds; standard output stays free for the
report. Nothing runs in the background: the line is looked at between two steps, and written at most once in `pause_s`.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from perfdoctor.report.lines import cut
from perfdoctor.units import format_duration

_TERMINAL_S, _FILE_S = 1.0, 10.0
_CLEAR = "\r\x1b[K"  # to the start of the line, and clear what stands there


class ProgressLine:
    """`show(text)` between steps, `close()` at the end, which leaves a terminal without the line.

    Args:
        stream: where to write; standard error by default. None there (a process without one) writes nothing.
        now: the clock, in seconds.
    """

    def __init__(self, stream: TextIO | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._now = now
        self._rewritten = _is_terminal(self._stream)
        self._start = self._last = now()
        self._shown = False

    @property
    def pause_s(self) -> float:
        """The time between two lines."""
        return _TERMINAL_S if self._rewritten else _FILE_S

    def show(self, describe: Callable[[], str]) -> None:
        """Write what `describe()` says, if it is time to; an empty text is left out."""
        now = self._now()
        if now - self._last < self.pause_s:
            return
        self._last = now
        if text := describe():
            self._write(f"perfdoctor: {format_duration(1e9 * round(now - self._start))}, {text}")

    def close(self) -> None:
        """Take the line away. Safe to call twice."""
        if self._shown and self._rewritten:
            self._put(_CLEAR)
        self._shown = False

    def _write(self, text: str) -> None:
        if self._rewritten:
            # A line that wraps could not be rewritten.
            text = _CLEAR + cut(text, shutil.get_terminal_size().columns - 2) + " "
        self._put(text if self._rewritten else f"{text}\n")
        self._shown = True

    def _put(self, text: str) -> None:
        try:
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError):  # closed, or a pipe that nobody reads: no reason to end the user's run
            self._stream = None


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False
