"""From paired differences to a saving with its interval: Hodges-Lehmann and Wilcoxon's signed ranks.

Each block of an arm is paired with the mean of the blocks without it before and after: what drifts in a straight line
cancels. The estimate is the median of all pairwise means of the differences (Walsh averages), which no single wild
block moves; the interval is the one that Wilcoxon's signed-rank test does not reject at 5 %, or that of a bootstrap of
runs of neighbouring pairs where that is wider: on a host whose speed wanders, neighbours resemble each other. It needs
six pairs: fewer cannot exclude zero at 95 %, whatever they say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

FEWEST_PAIRS = 6
CONFIDENCE = 0.95
LEAST_CLAIM = 0.005  # of a step: below, nobody would edit a line
LARGE_CLAIM = 0.03  # of a step: above, a claim has to be beyond doubt
_BEYOND_NOTHING = 0.01  # of a step: what a large claim must leave out
_SURE = 3.3 / 1.96  # from the 95 % interval's half width to that of one in a thousand
_DRAWS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A difference in ns with its interval; `num_pairs` differences stand behind it."""

    mid_ns: float
    low_ns: float
    high_ns: float
    num_pairs: int

    @property
    def certain(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low_ns > 0 or self.high_ns < 0


_CLIPPED = 0.92


def steady_means(blocks: Sequence[tuple[int, NDArray[np.float64]]]) -> list[tuple[int, float]]:
    """`(arm, mean step)` of each block, from `(arm, steps)`: hiccups are cut, what comes regularly is kept.

    A step's distance from its block's median is clipped to the 8th and 92nd percentile of all such distances of the
    same arm: what strikes one step in thirteen or more (a loader's stall, every tenth step's read) counts, what strikes
    less often is the host's own. On simulated hosts with a 30 ms hiccup in 1 % of the steps of 25 ms, a saving of 5 %
    is then always found with twelve pairs; by plain means it is missed in one of five trials.
    """
    middles = [float(np.median(steps)) for _, steps in blocks]
    off = [steps - middle for (_, steps), middle in zip(blocks, middles, strict=True)]
    limits = {}
    for arm in {arm for arm, _ in blocks}:
        distances = np.concatenate([each for (a, _), each in zip(blocks, off, strict=True) if a == arm])
        limits[arm] = np.quantile(distances, (1 - _CLIPPED, _CLIPPED))
    rows = zip(blocks, off, middles, strict=True)
    return [(arm, middle + float(np.clip(each, *limits[arm]).mean())) for (arm, _), each, middle in rows]


def plain_means(blocks: Sequence[tuple[int, NDArray[np.float64]]]) -> list[tuple[int, float]]:
    """`(arm, mean step)` of each block with nothing cut: for what strikes few steps and is meant."""
    return [(arm, float(steps.mean())) for arm, steps in blocks]


def paired(before: Sequence[float], arm: Sequence[float], after: Sequence[float]) -> NDArray[np.float64]:
    """What each block of an arm saves against the mean of its two neighbours. Shape (n,), the unit of the input."""
    neighbours = (np.asarray(before, np.float64) + np.asarray(after, np.float64)) / 2
    return np.subtract(neighbours, np.asarray(arm, np.float64), dtype=np.float64)


def claimed(measured: Estimate, base_ns: float) -> Estimate:
    """The same estimate, its interval widened to hold zero where it does not suffice for a claim.

    Nothing is claimed below half a percent of the step. Above 3 %, one chance in twenty of a claim out of nothing is
    too much: what remains at one in a thousand must still be more than 1 %.
    """
    if not measured.certain or base_ns <= 0:
        return measured
    size = abs(measured.mid_ns) / base_ns
    sign = 1.0 if measured.mid_ns > 0 else -1.0
    near = measured.low_ns if sign > 0 else measured.high_ns
    sure = (abs(measured.mid_ns) - _SURE * abs(measured.mid_ns - near)) / base_ns
    if size >= LEAST_CLAIM and (size <= LARGE_CLAIM or sure > _BEYOND_NOTHING):
        return measured
    return replace(measured, low_ns=min(measured.low_ns, 0.0), high_ns=max(measured.high_ns, 0.0))


def half_width(measured: Estimate) -> float:
    """Half of the interval, ns."""
    return (measured.high_ns - measured.low_ns) / 2


def estimate(differences: Sequence[float] | NDArray[np.float64]) -> Estimate:
    """The middle of the differences and its 95 % interval.

    With fewer than six differences the interval is widened by the whole range of what was seen, and holds zero.
    Raises ValueError for none at all.
    """
    values = np.asarray(differences, float)
    if not len(values):
        raise ValueError("no pair of blocks was measured")
    walsh = walsh_averages(values)
    mid = float(np.median(walsh))
    rank = critical_rank(len(values))
    if rank < 0:
        span = float(np.ptp(values)) + abs(mid)
        return Estimate(mid_ns=mid, low_ns=mid - span, high_ns=mid + span, num_pairs=len(values))
    low, high = _bootstrap(values, _midmean) if len(values) >= _FEWEST_FOR_RUNS else (mid, mid)
    return Estimate(
        mid_ns=mid,
        low_ns=min(float(walsh[rank]), low),
        high_ns=max(float(walsh[len(walsh) - 1 - rank]), high),
        num_pairs=len(values),
    )


def estimate_mean(differences: Sequence[float] | NDArray[np.float64]) -> Estimate:
    """The mean and its interval, for what happens in few blocks (a full garbage collection): a median misses it.

    The interval is a bootstrap's, drawn with a fixed seed.
    """
    values = np.asarray(differences, float)
    if len(values) < FEWEST_PAIRS:
        return estimate(values)
    low, high = _bootstrap(values, lambda rows: rows.mean(axis=1))
    return Estimate(mid_ns=float(values.mean()), low_ns=low, high_ns=high, num_pairs=len(values))


_FEWEST_FOR_RUNS = 24  # pairs: fewer hold too few runs to draw from
_RUN = 4  # neighbouring pairs drawn together


def _bootstrap(
    values: NDArray[np.float64], middle: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> tuple[float, float]:
    """The 95 % interval of a middle over redrawn differences, a run of neighbours at a time. Fixed seed."""
    run = _RUN if len(values) >= _FEWEST_FOR_RUNS else 1
    draws = _DRAWS if run > 1 else 10 * _DRAWS
    starts = np.random.default_rng(0).integers(0, len(values), (draws, -(-len(values) // run)))
    at = (starts[:, :, None] + np.arange(run)) % len(values)
    drawn = middle(values[at.reshape(len(at), -1)[:, : len(values)]])
    low, high = np.quantile(drawn, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return float(low), float(high)


def _midmean(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of the middle half of each row."""
    trimmed = np.sort(rows, axis=1)
    cut = rows.shape[1] // 4  # the mean of the middle half wanders as the Walsh median does, at a hundredth of the time
    return np.asarray(trimmed[:, cut : rows.shape[1] - cut].mean(axis=1), np.float64)


def walsh_averages(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The means of all pairs, each value with itself included, sorted. Shape (n (n + 1) / 2,)."""
    first, second = np.triu_indices(len(values))
    return np.sort((values[first] + values[second]) / 2)


def critical_rank(num_pairs: int) -> int:
    """The largest k with P(W <= k) <= 2.5 % for Wilcoxon's signed-rank sum W of `num_pairs` values; -1 for none.

    Exact: the distribution of a sum of the ranks 1..n, each taken with probability one half.
    """
    chances = np.ones(1)
    for rank in range(1, num_pairs + 1):
        longer = np.zeros(len(chances) + rank)
        longer[: len(chances)] += chances / 2
        longer[rank:] += chances / 2
        chances = longer
    below = np.cumsum(chances) <= (1 - CONFIDENCE) / 2 + 1e-12
    return int(below.sum()) - 1
