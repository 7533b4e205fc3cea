"""Finding the period of a sequence of names: how often a loop without step marks went round."""

from __future__ import annotations

import numpy as np

from perfdoctor.record.capture import Ints

MATCH = 0.95  # share of a turn's places that must agree with those of the usual turn
ALIKE = 2 / 3  # share of turns that must be like the usual one; the others hold an evaluation, a log line
_CANDIDATES = 64
_TRIED = 200  # turns looked at, evenly spread


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
        if _agreement(names, positions) >= ALIKE:
            return positions
        if len(seen) >= _CANDIDATES:
            break
    return best


def _agreement(names: Ints, positions: Ints) -> float:
    """The share of turns that are like the usual one, itself not counted; 0 where too little is covered."""
    lengths = np.diff(positions)
    covered = (positions[-1] - positions[0]) / len(names)
    # Head and tail outside the whole periods may hold at most one period each.
    if len(lengths) < 2 or covered < 1 - 2.0 / len(positions):
        return 0.0
    values, counts = np.unique(lengths, return_counts=True)
    usual = int(values[np.argmax(counts)])
    # Turns of another length cannot be like it: most sequences without a period end here.
    alike = np.minimum(lengths, usual) >= MATCH * np.maximum(lengths, usual)
    if alike.mean() < ALIKE:
        return 0.0
    first = int(np.argmax(lengths == usual))
    model = names[positions[first] : positions[first + 1]]
    tried = np.setdiff1d(np.linspace(0, len(lengths) - 1, min(len(lengths), _TRIED)).astype(np.int64), [first])
    likely = [_likeness(names[positions[i] : positions[i + 1]], model) >= MATCH for i in tried.tolist()]
    return float(np.mean(likely))


def _likeness(turn: Ints, model: Ints) -> float:
    """The share of places that agree, counted from the front, or from both ends where something was put in."""
    common = min(len(turn), len(model))
    same = turn[:common] == model[:common]
    from_front = common if same.all() else int(np.argmin(same))
    tail = (turn[::-1][:common] == model[::-1][:common])[: common - from_front]
    from_back = len(tail) if tail.all() else int(np.argmin(tail))
    return max(int(same.sum()), from_front + from_back) / max(len(turn), len(model))
