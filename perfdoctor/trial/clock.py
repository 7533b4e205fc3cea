"""Times of steps from stamps at their ends. Nothing waits for the device before the last step is over."""

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

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def times(self) -> list[tuple[int, NDArray[np.float64]]]:
        """`(arm, ns of each step)` of each block, in order. Waits for the device."""
        return [(arm, self._durations(stamps)) for arm, stamps in self._blocks]

    def _durations(self, stamps: list[Any]) -> NDArray[np.float64]:
        pairs = itertools.pairwise(stamps)
        return np.array([self._elapsed(first, second) for first, second in pairs], np.float64)
