"""What a phase costs: its step times against the bare ones, with an interval."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.capture import Overhead

_ROUNDS = 500
_FEWEST = 3


def measure_overhead(phase: str, bare_ns: NDArray[np.int64], phase_ns: NDArray[np.int64]) -> Overhead | None:
    """The ratio of medians minus one, with a 90 % bootstrap interval; None with fewer than three steps on a side."""
    if min(len(bare_ns), len(phase_ns)) < _FEWEST:
        return None
    # A generator of its own with a fixed seed: the loop's random numbers stay the loop's.
    rng = np.random.default_rng(0)
    bare = np.median(rng.choice(bare_ns, (_ROUNDS, len(bare_ns))), axis=1)
    traced = np.median(rng.choice(phase_ns, (_ROUNDS, len(phase_ns))), axis=1)
    low, high = np.percentile(traced / bare - 1, (5, 95))
    ratio = float(np.median(phase_ns) / np.median(bare_ns) - 1)
    return Overhead(phase=phase, ratio=ratio, low=float(low), high=float(high))
