"""Finding the period of a sequence of names: how often a loop without step marks went round."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from perfdoctor.record.capture import Ints

MATCH = 0.95  # share of positions that must agree with the one a period later
_CANDIDATES = 64


def find_repetition(names: Ints) -> Ints:
    """Positions at which a sequence begins anew: `[0, p, 2p, ...]` with the last one where the last whole period ends.

    The sequence may differ here and there (an evaluation, one more kernel in one step), so that the positions need not
    be evenly spaced: they are found as the occurrences of one name that occurs once in every period.

    Returns an empty array where nothing repeats at least twice.
    """
    if len(names) < 4:
        return np.empty(0, np.int64)
    values, counts = np.unique(names, return_counts=True)
    candidates = [(count, value) for value, count in zip(values.tolist(), counts.tolist(), strict=True) if count >= 2]
    seen: set[int] = set()
    best: Ints = np.empty(0, np.int64)
    for _, value in sorted(candidates):
        positions = np.flatnonzero(names == value)
        period = int(np.median(np.diff(positions)))
        if period in seen or period < 2:
            continue
        seen.add(period)
        if _agreement(names, positions) >= MATCH:
            return positions
        if len(seen) >= _CANDIDATES:
            break
    return best


def _agreement(names: Ints, positions: Ints) -> float:
    """The share of places in a period that equal the same place of the period before; 0 where too little is covered."""
    same = total = 0
    periods = [names[a:b] for a, b in pairwise(positions.tolist())]
    for left, right in pairwise(periods):
        length = max(len(left), len(right))
        common = min(len(left), len(right))
        same += int((left[:common] == right[:common]).sum())
        total += length
    covered = (positions[-1] - positions[0]) / len(names)
    # Head and tail outside the whole periods may hold at most one period each.
    if total == 0 or covered < 1 - 2.0 / max(len(positions), 1):
        return 0.0
    return same / total
