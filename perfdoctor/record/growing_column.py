"""A column of int64 that grows in place while a file is read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_FIRST_ROWS = 4096
_GROWTH = 1.25  # enlarging moves pages, not values: little room to spare keeps the peak near the final size


class GrowingColumn:
    """Appends arrays to one buffer. Joining chunks at the end would hold every value twice."""

    def __init__(self) -> None:
        self._values: Ints = np.empty(_FIRST_ROWS, np.int64)
        self._count = 0

    def append(self, values: Ints) -> None:
        """Add values behind the others. Shape (n,)."""
        end = self._count + len(values)
        if end > len(self._values):
            self._values.resize(max(end, int(len(self._values) * _GROWTH)), refcheck=False)
        self._values[self._count : end] = values
        self._count = end

    def finish(self) -> Ints:
        """The column, which may not grow any more."""
        self._values.resize(self._count, refcheck=False)
        return self._values
