"""Sets of half-open time intervals `[start, end)` as two sorted integer arrays. Pure functions, numpy only.

A *set* here is a pair `(starts, ends)` of int64 arrays in which `starts[i] < ends[i] < starts[i + 1]`:
sorted, without empty members, and merged where members touch. `union` makes one from any intervals.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Intervals = tuple[Ints, Ints]

EMPTY: Intervals = (np.empty(0, np.int64), np.empty(0, np.int64))


def union(starts: Ints, ends: Ints) -> Intervals:
    """The set covered by any intervals, in any order. Empty and negative ones cover nothing."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return EMPTY
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    first = np.ones(len(starts), bool)
    first[1:] = starts[1:] > reach[:-1]
    last = np.append(np.flatnonzero(first)[1:] - 1, len(starts) - 1)
    return starts[first], reach[last]


def total(intervals: Intervals) -> int:
    """The length of a set in its own unit."""
    return int((intervals[1] - intervals[0]).sum())


def clip(intervals: Intervals, start: int, end: int) -> Intervals:
    """The part of a set inside `[start, end)`."""
    starts, ends = np.maximum(intervals[0], start), np.minimum(intervals[1], end)
    keep = ends > starts
    return starts[keep], ends[keep]


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """What lies in both sets."""
    if not len(left[0]) or not len(right[0]):
        return EMPTY
    # Every member of the answer begins where a member of one side begins inside the other side.
    points = _points(left, right)
    inside = _contains(left, points[:-1]) & _contains(right, points[:-1])
    return union(points[:-1][inside], points[1:][inside])


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """What lies in `left` and not in `right`."""
    if not len(left[0]) or not len(right[0]):
        return left
    points = _points(left, right)
    inside = _contains(left, points[:-1]) & ~_contains(right, points[:-1])
    return union(points[:-1][inside], points[1:][inside])


def _points(left: Intervals, right: Intervals) -> Ints:
    # Points met twice give empty intervals, which `union` drops. numpy's hashing `unique` took 20 times as long.
    points: Ints = np.sort(np.concatenate((*left, *right)), kind="stable")
    return points


def merge(left: Intervals, right: Intervals) -> Intervals:
    """What lies in either set."""
    return union(np.concatenate((left[0], right[0])), np.concatenate((left[1], right[1])))


def covered(intervals: Intervals, starts: Ints, ends: Ints) -> Ints:
    """For every query `[starts[i], ends[i])` the length of the set inside it. Shapes (n,) -> (n,)."""
    if not len(intervals[0]):
        return np.zeros(len(starts), np.int64)
    lengths: Ints = np.maximum(_covered_before(intervals, ends) - _covered_before(intervals, starts), 0)
    return lengths


def _covered_before(intervals: Intervals, points: Ints) -> Ints:
    starts, ends = intervals
    sums = np.concatenate(([0], np.cumsum(ends - starts))).astype(np.int64)
    index = np.searchsorted(starts, points, side="right")
    inside = np.where(index > 0, np.minimum(points, ends[index - 1]) - starts[index - 1], 0)
    before = sums[np.maximum(index - 1, 0)]
    return np.where(index > 0, before + inside, 0)


def _contains(intervals: Intervals, points: Ints) -> NDArray[np.bool_]:
    starts, ends = intervals
    index = np.searchsorted(starts, points, side="right") - 1
    inside: NDArray[np.bool_] = (index >= 0) & (points < ends[np.maximum(index, 0)])
    return inside
