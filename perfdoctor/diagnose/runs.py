"""Runs of True in a mask."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def runs_of(mask: NDArray[np.bool_], shortest: int = 1) -> list[tuple[int, int]]:
    """`[start, stop)` of each maximal run of at least `shortest` True, in order."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.view(np.int8), [0])))).reshape(-1, 2)
    return [(int(a), int(b)) for a, b in edges[edges[:, 1] - edges[:, 0] >= shortest]]
