"""A timing is a value with its doubt: the raw times, and what is derived from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_NOISY = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Times of one thing done several times, in nanoseconds."""

    name: str
    times_ns: tuple[float, ...]

    @property
    def median_ns(self) -> float:
        return float(np.median(self.times_ns))

    @property
    def spread(self) -> float:
        """Interquartile range over the median: 0.02 is steady."""
        low, high = np.percentile(self.times_ns, (25, 75))
        return float((high - low) / max(self.median_ns, 1e-9))

    @property
    def warning(self) -> str | None:
        """What to doubt, if anything."""
        if len(self.times_ns) < 5:
            return f"{self.name}: only {len(self.times_ns)} times"
        if self.spread > _NOISY:
            return f"{self.name}: the middle half of the times spreads over {100 * self.spread:.0f} % of the median"
        return None


def measure(name: str, run: Callable[[], object], settle: Callable[[], object], *, repeats: int = 30,
            warmup: int = 3, per_run: int = 1) -> Measurement:  # fmt: skip
    """Wall time from the call of `run` to its completion; `settle` waits for the device (it may do nothing).

    `per_run`: how many times `run` does the thing that is measured.
    """
    for _ in range(warmup):
        run()
    settle()
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        run()
        settle()
        times.append((time.perf_counter_ns() - start) / per_run)
    return Measurement(name=name, times_ns=tuple(times))
