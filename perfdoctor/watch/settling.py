"""Whether a loop has settled: nothing compiled and no memory asked from the driver in its last steps."""

from __future__ import annotations

import sys
from typing import Any

from perfdoctor.watch.clocks import cuda_active

_QUIET_STEPS = 2


class Settling:
    """Ask once a step, in warm-up only: reading the allocator's counters costs about 0.1 ms."""

    def __init__(self) -> None:
        self._before: tuple[int, ...] | None = None
        self._quiet = 0

    def settled(self) -> bool:
        """True after two steps in a row that compiled nothing and grew no memory."""
        now = (_compilations(), _segments())
        self._quiet = self._quiet + 1 if now == self._before else 0
        self._before = now
        return self._quiet >= _QUIET_STEPS


def _compilations() -> int:
    # Only where the loop itself has imported it: importing torch._dynamo takes seconds.
    module: Any = sys.modules.get("torch._dynamo.utils")
    counters = getattr(module, "counters", None)
    return sum(counters["frames"].values()) + sum(counters["stats"].values()) if counters else 0


def _segments() -> int:
    if not cuda_active():
        return 0
    return int(sys.modules["torch"].cuda.memory_stats().get("segment.all.allocated", 0))
