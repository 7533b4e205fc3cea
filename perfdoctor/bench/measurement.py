"""A timing is a value with its doubt: the raw times, and what is derived from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from perfdoctor.units import format_bytes, format_duration

_NOISY = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Times of one thing done several times, in nanoseconds."""

    name: str
    times_ns: tuple[float, ...]
    bytes_moved: float | None = None
    """what one call reads and writes"""
    num_flops: float | None = None
    """floating-point operations of one call"""

    @property
    def median_ns(self) -> float:
        return float(np.median(self.times_ns))

    @property
    def spread(self) -> float:
        """Interquartile range over the median: 0.02 is steady."""
        low, high = np.percentile(self.times_ns, (25, 75))
        return float((high - low) / max(self.median_ns, 1e-9))

    @property
    def bytes_per_s(self) -> float | None:
        """Of the median call; None where the bytes were not given."""
        return None if self.bytes_moved is None else 1e9 * self.bytes_moved / max(self.median_ns, 1e-9)

    @property
    def flops_per_s(self) -> float | None:
        """Of the median call; None where the operations were not given."""
        return None if self.num_flops is None else 1e9 * self.num_flops / max(self.median_ns, 1e-9)

    @property
    def warning(self) -> str | None:
        """What to doubt, if anything."""
        if len(self.times_ns) < 5:
            return f"{self.name}: only {len(self.times_ns)} times"
        if self.spread > _NOISY:
            return f"{self.name}: the middle half of the times spreads over {100 * self.spread:.0f} % of the median"
        return None

    def __str__(self) -> str:
        doubt = f"+-{100 * self.spread:.0f} % ({len(self.times_ns)} times)"
        text = f"{self.name}: {format_duration(self.median_ns)} {doubt}"
        if self.flops_per_s is not None:
            text += f", {format_flops(self.flops_per_s)}"
        if self.bytes_per_s is not None:
            text += f", {format_bytes(self.bytes_per_s)}/s"
        return text


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


def format_flops(per_second: float) -> str:
    """Operations a second in the field's unit: '724 TFLOP/s', '1.2 GFLOP/s'."""
    for limit, unit in ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s")):
        if per_second >= limit:
            return f"{per_second / limit:.3g} {unit}"
    return f"{per_second / 1e6:.3g} MFLOP/s"
