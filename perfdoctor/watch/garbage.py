"""Garbage collections as pauses, and calls of `gc.collect()` as hits with their line."""

from __future__ import annotations

import gc
import sys
import threading
import time
from typing import Any

from perfdoctor.record.call_site import HitLog
from perfdoctor.record.instruction import called_name
from perfdoctor.watch.pauses import Pause
from perfdoctor.watch.uncompiled import frame_evaluation, keep_uncompiled

# CPython 3.12 starts with 375 frozen objects; where torch is loaded, gc.freeze() takes more than 100 000.
_FROZEN_AT_START = 10_000


def froze_objects() -> bool:
    """Whether the script called `gc.freeze()` and what it has is out of the collector's sight."""
    return gc.get_freeze_count() > _FROZEN_AT_START


class CollectionHook:
    """While installed, every collection of Python's garbage collector is a pause; about 1 us each."""

    def __init__(self, log: HitLog, pauses: list[Pause]) -> None:
        self._log = log
        self._pauses = pauses
        self._start_ns = 0
        self._frames: Any = None

    def install(self) -> None:
        """Listen. Listening twice is listening once."""
        # A collection may come inside compiled code: 54 frames of ours were compiled there.
        if keep_uncompiled(CollectionHook._collected.__code__):
            self._frames = frame_evaluation()
        if self._collected not in gc.callbacks:
            gc.callbacks.append(self._collected)

    def remove(self) -> None:
        """Stop listening."""
        while self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, details: dict[str, Any]) -> None:
        frames = self._frames
        if frames is None:
            self._note(phase, details)
            return
        compiler = frames.set_eval_frame(None)
        try:
            self._note(phase, details)
        finally:
            frames.set_eval_frame(compiler)

    def _note(self, phase: str, details: dict[str, Any]) -> None:
        now = time.time_ns()
        if phase == "start":
            self._start_ns = now
            return
        generation = int(details.get("generation", 0))
        thread = threading.get_native_id()
        self._pauses.append(Pause(self._start_ns, now, thread, f"gc:{generation}", int(details.get("collected", -1))))
        frame = sys._getframe(1).f_back  # None where a thread without Python's frames, or the end of Python, collects
        # An automatic collection comes up at any instruction; only gc.collect() has a line that is to blame.
        if frame is not None and generation == 2 and called_name(frame) == "collect":
            self._log.add("python_gc", frame, self._start_ns, now)
