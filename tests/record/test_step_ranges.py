"""Which ranges are steps and phases."""

from __future__ import annotations

import numpy as np
import pytest

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
