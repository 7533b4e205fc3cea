"""Sets of intervals against a set of integer points, which is slow and cannot be wrong."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from perfdoctor.record import intervals
from perfdoctor.record.intervals import EMPTY, Intervals

TOP = 40
ANY = st.lists(st.tuples(st.integers(0, TOP), st.integers(0, TOP)), max_size=12)


def arrays(pairs: list[tuple[int, int]]) -> Intervals:
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def points(pairs: list[tuple[int, int]]) -> set[int]:
    return {point for start, end in pairs for point in range(start, end)}


def points_of(found: Intervals) -> set[int]:
    """The points of a set, after a check that it is one: sorted, not empty, not touching."""
    starts, ends = found
    assert (starts < ends).all()
    assert (ends[:-1] < starts[1:]).all()
    assert starts.dtype == ends.dtype == np.int64
    return points(list(zip(starts.tolist(), ends.tolist(), strict=True)))


@given(ANY)
def test_union(pairs: list[tuple[int, int]]) -> None:
    found = intervals.union(*arrays(pairs))
    assert points_of(found) == points(pairs)
    assert intervals.total(found) == len(points(pairs))


@given(ANY, ANY)
def test_operations_on_two_sets(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    a, b = intervals.union(*arrays(left)), intervals.union(*arrays(right))
    assert points_of(intervals.intersect(a, b)) == points(left) & points(right)
    assert points_of(intervals.subtract(a, b)) == points(left) - points(right)
    assert points_of(intervals.merge(a, b)) == points(left) | points(right)


@given(ANY, st.integers(0, TOP), st.integers(0, TOP))
def test_clip(pairs: list[tuple[int, int]], start: int, end: int) -> None:
    found = intervals.union(*arrays(pairs))
    assert points_of(intervals.clip(found, start, end)) == points(pairs) & set(range(start, end))


@given(ANY, ANY)
def test_covered(pairs: list[tuple[int, int]], queries: list[tuple[int, int]]) -> None:
    found = intervals.covered(intervals.union(*arrays(pairs)), *arrays(queries))
    assert found.tolist() == [len(points(pairs) & points([query])) for query in queries]


def test_empty_set() -> None:
    assert intervals.total(EMPTY) == 0
