"""Barriers between ranks: the host waits there for the slowest of them, and with NCCL for the device as well.

torch reports no synchronisation for them. Lightning puts one before each reduction of `self.log(..., sync_dist=True)`.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

from perfdoctor.record.call_site import HitLog, own_frame
from perfdoctor.record.library_kinds import barrier_kind
from perfdoctor.watch.patches import Patches

_MODULES = ("torch.distributed", "torch.distributed.distributed_c10d")


class BarrierHook:
    """While installed, each `torch.distributed.barrier` is a hit with its line. About 1 us beside a call of 100 us."""

    def __init__(self, log: HitLog) -> None:
        self._log = log
        self._patches = Patches()

    def install(self) -> None:
        """Listen, where the process is one of several ranks. Installing twice is installing once."""
        distributed: Any = sys.modules.get("torch.distributed")
        if self._patches or distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return
        noted = self._noted(distributed.barrier)
        for name in _MODULES:
            self._patches.replace(sys.modules[name], "barrier", noted)

    def remove(self) -> None:
        """Stop listening."""
        self._patches.undo()

    def _noted(self, barrier: Any) -> Any:
        compiling = sys.modules["torch"].compiler.is_compiling

        @functools.wraps(barrier)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if compiling():
                return barrier(*args, **kwargs)
            start = time.time_ns()
            try:
                return barrier(*args, **kwargs)
            finally:
                frame = sys._getframe(1)
                self._log.add(barrier_kind(own_frame(frame)), frame, start, time.time_ns())

        return noted
