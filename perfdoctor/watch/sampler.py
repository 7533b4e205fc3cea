"""Looks at the loop's stack about a thousand times a second, for the lines that a recording cannot name.

A CUDA recording knows what was launched and when, never by which line. During the full recording, whose timing nobody
relies on, a thread of ours notes where the loop's thread is. It takes the interpreter lock for some 10 us a look; in a
process that holds the lock for long (Python loops) it gets its turn every `sys.getswitchinterval()`, 5 ms by default.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from perfdoctor.record.call_site import SiteTable
from perfdoctor.watch.thread_frames import frame_of

PERIOD_S = 0.001

Row = tuple[int, int, int]  # time in ns, native thread id, site


class StackSampler:
    """Samples the thread that calls `start` until `stop`. `rows` keeps what was seen."""

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        self._rows: list[Row] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def rows(self) -> Sequence[Row]:
        return self._rows

    def start(self) -> None:
        """Begin to sample the calling thread."""
        if self._thread is not None:
            return
        self._over.clear()
        watched = threading.get_ident(), threading.get_native_id()
        self._thread = threading.Thread(target=self._run, args=watched, name="perfdoctor-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End sampling and wait for the thread: at most a period and a look."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def _run(self, ident: int, native: int) -> None:
        while not self._over.wait(PERIOD_S):
            frame = frame_of(ident)
            if frame is None:  # the loop's thread has ended
                return
            self._rows.append((time.time_ns(), native, self._sites.at(frame)))
            del frame  # holds the loop's locals alive
