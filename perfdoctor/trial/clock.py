"""Times of steps from stamps at their ends. Within a block nothing waits for the device.

Between blocks something does. An arm that takes host time out of a loop bound by the device runs ahead of it by up to
a thousand launches; steps without the arm then look fast until that queue is used up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfdoctor.watch.clocks import Stamp, elapsed_ns

Elapsed = Callable[[Any, Any], int]


class BlockClock:
    """Keeps the stamps of each block's counted steps: `begin`, one `tick` at the end of each, `end`."""

    def __init__(self, elapsed: Elapsed = elapsed_ns) -> None:
        self._elapsed = elapsed
        self._running: list[Any] = []
        self._blocks: list[tuple[int, list[Any]]] = []
        self._times: list[tuple[int, NDArray[np.float64]]] = []  # of the blocks that were asked for already

    def begin(self, stamp: Stamp | Any) -> None:
        """Counting begins."""
        self._running = [stamp]

    def tick(self, stamp: Stamp | Any) -> None:
        """A counted step ended."""
        self._running.append(stamp)

    def end(self, arm: int) -> None:
        """The block is over, `arm` was on."""
        self._blocks.append((arm, self._running))
        self._running = []

    def drain(self, stamp: Stamp | Any) -> None:
        """Between two blocks: wait until the device has caught up, so that no queue of one arm runs into the next."""
        event = getattr(stamp, "event", None)
        if event is not None:
            event.synchronize()

    def times(self) -> list[tuple[int, NDArray[np.float64]]]:
        """`(arm, ns of each step)` of each block, in order. Waits for the device."""
        for arm, stamps in self._blocks[len(self._times) :]:
            self._times.append((arm, self._durations(stamps)))
        return list(self._times)

    def _durations(self, stamps: list[Any]) -> NDArray[np.float64]:
        pairs = itertools.pairwise(stamps)
        return np.array([self._elapsed(first, second) for first, second in pairs], np.float64)
