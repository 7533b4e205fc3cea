"""Which ranges are steps and phases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfdoctor.record.capture import RangeKind, Ranges
from perfdoctor.record.step_ranges import range_kinds, step_family, steps_of


@pytest.mark.parametrize(
    ("name", "family", "number"),
    [
        ("ProfilerStep#12", "profilerstep", 12),
        ("step 12", "step", 12),
        ("step_12", "step", 12),
        ("Step-3", "step", 3),
        ("step12", "step", 12),
        ("train_step 7", "train_step", 7),
        ("iteration 4", "iteration", 4),
        ("iter_4", "iter", 4),
        ("batch 9", "batch", 9),
        ("global_step=100", "global_step", 100),
        ("## step 3 ##", "step", 3),
        ("step (3)", "step", 3),
        ("step", "unnumbered", -1),
        ("train_step", "unnumbered", -1),
        ("Optimizer.step#AdamW.step", "", -1),
        ("batch_norm", "", -1),
        ("stepwise 3", "", -1),
        ("data", "", -1),
        ("batch_norm 3", "", -1),
        ("layer 3", "", -1),
        ("footstep 3", "", -1),
        ("step 3 forward", "", -1),
    ],
)
def test_step_family(name: str, family: str, number: int) -> None:
    assert step_family(name) == (family, number)


def kinds_of(names: list[str], threads: list[int] | None = None) -> tuple[list[str], list[int]]:
    strings = sorted(set(names))
    name = np.array([strings.index(n) for n in names], np.int64)
    kinds, numbers = range_kinds(strings, name, np.array(threads or [1] * len(names), np.int64))
    return [RangeKind(k).name for k in kinds], numbers.tolist()


def test_profiler_steps_win_over_others() -> None:
    kinds, numbers = kinds_of(["step 1", "ProfilerStep#5", "step 2", "ProfilerStep#6", "step 3"])
    assert kinds == ["USER", "STEP", "USER", "STEP", "USER"]
    assert numbers == [-1, 5, -1, 6, -1]


def test_the_commonest_family_of_one_thread() -> None:
    kinds, _ = kinds_of(["batch 1", "step 1", "step 2", "step 1", "step 2", "step 3"], [1, 1, 1, 2, 2, 2])
    assert kinds == ["USER", "USER", "USER", "STEP", "STEP", "STEP"]


def test_steps_without_numbers_count_when_they_repeat() -> None:
    assert kinds_of(["train_step", "train_step"])[0] == ["STEP", "STEP"]
    assert kinds_of(["train_step"])[0] == ["USER"]


def test_phases() -> None:
    names = [
        "data",
        "forward",
        "Backward",
        "optimizer_step",
        "## forward ##",
        "enumerate(DataLoader)#_X.__next__",
        "Optimizer.step#SGD.step",
        "h2d",
    ]
    assert set(kinds_of(names)[0]) == {"PHASE"}
    assert set(kinds_of(["attention", "dataset_info", "my forward pass 2"])[0]) == {"USER"}
    assert kinds_of([]) == ([], [])


def test_steps_are_sorted_and_numbered() -> None:
    ranges = Ranges.from_rows(
        [(50, 90, 1, 0, RangeKind.STEP), (0, 40, 1, 1, RangeKind.STEP), (5, 6, 1, 2, RangeKind.USER)]
    )
    steps = steps_of(ranges, np.array([8, 7, -1]), np.array([True, False, False]))
    assert steps.index.tolist() == [7, 8]
    assert steps.complete.tolist() == [1, 0]
    assert steps_of(ranges, np.array([-1, -1, -1])).index.tolist() == [0, 1]


def steps_among(*marks: tuple[int, int], unfinished: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    ranges = Ranges.from_rows([(start, end, 1, 0, RangeKind.STEP) for start, end in marks])
    open_ends = np.isin(np.arange(len(marks)), unfinished)
    found = steps_of(ranges, np.full(len(marks), 3), open_ends)
    return list(zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True))


@pytest.mark.parametrize(
    ("marks", "steps"),
    [
        ([(0, 10), (0, 10), (10, 20), (10, 20)], [(0, 10), (10, 20)]),  # recorded twice
        ([(0, 10), (1, 9), (10, 20), (11, 19)], [(0, 10), (10, 20)]),  # marked by two layers
        ([(0, 30), (0, 10), (10, 20), (20, 30)], [(0, 10), (10, 20), (20, 30)]),  # an epoch around its steps
        ([(0, 30), (0, 30), (0, 10), (11, 20)], [(0, 10), (11, 20)]),  # an epoch recorded twice
        ([(0, 30), (0, 10), (1, 9), (10, 30)], [(0, 10), (10, 30)]),
        ([(0, 15), (10, 25), (20, 35)], [(0, 15), (10, 25), (20, 35)]),  # each runs over the next one's begin
        ([(0, 10), (10, 10), (10, 20)], [(0, 10), (10, 20), (10, 10)]),  # a mark of no length is left alone
    ],
)
def test_marks_inside_marks(marks: list[tuple[int, int]], steps: list[tuple[int, int]]) -> None:
    assert steps_among(*marks) == steps
    assert steps_among(*reversed(marks)) == steps


def test_a_mark_that_was_never_closed_swallows_none() -> None:
    """Its end is that of the recording, so that it lies around every later step."""
    assert steps_among((0, 90), (10, 20), (20, 30), unfinished=(0,)) == [(0, 90), (10, 20), (20, 30)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=12))
def test_no_step_lies_inside_another(marks: list[tuple[int, int]]) -> None:
    steps = steps_among(*((start, start + length) for start, length in marks))
    assert len(steps) == len(set(steps))
    for i, (start, end) in enumerate(steps):
        assert not any(start <= a and b <= end for j, (a, b) in enumerate(steps) if j != i)
    assert bool(steps) == bool(marks)
