"""Where a launch sequence begins anew, for loops that somebody could have written."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfdoctor.record.repetition import find_repetition


def numbers(text: list[str]) -> np.ndarray:  # type: ignore[type-arg]
    known: dict[str, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in text], np.int64)


LAYER = ["norm", "gemm", "gelu", "gemm", "add"]
STEP = ["embed", *LAYER * 6, "head", "loss", *["dgemm", "dgelu", "dgemm", "dnorm"] * 6, "adam"]
EVALUATION = [*(["embed", *LAYER * 6, "head", "metric"] * 3)]


def turns(positions: np.ndarray) -> list[tuple[int, int]]:  # type: ignore[type-arg]
    return list(pairwise(positions.tolist()))


def test_a_loop_repeats_with_the_period_of_its_step_not_of_its_layers() -> None:
    positions = find_repetition(numbers(STEP * 8))
    assert set(np.diff(positions).tolist()) == {len(STEP)}
    assert len(positions) == 8


@pytest.mark.parametrize("head", [0, 3, len(STEP) - 1])
def test_a_recording_that_begins_and_ends_inside_a_step(head: int) -> None:
    positions = find_repetition(numbers((STEP * 9)[head:-5]))
    assert set(np.diff(positions).tolist()) == {len(STEP)}


@pytest.mark.parametrize("place", [0, 1, len(STEP) // 2, len(STEP) - 2])
def test_one_kernel_more_in_one_turn(place: int) -> None:
    longer = [*STEP[: place + 1], "zeros", *STEP[place + 1 :]]
    positions = find_repetition(numbers(STEP * 4 + longer + STEP * 5))
    lengths = np.diff(positions).tolist()
    assert sorted(set(lengths)) == [len(STEP), len(STEP) + 1]
    assert lengths.count(len(STEP) + 1) == 1


def test_an_evaluation_in_between() -> None:
    positions = find_repetition(numbers(STEP * 5 + EVALUATION + STEP * 5))
    lengths = np.diff(positions).tolist()
    assert lengths.count(len(STEP)) >= 7
    assert len(positions) == 10


def test_gradient_accumulation_turns_once_an_update() -> None:
    micro = [name for name in STEP if name != "adam"]
    positions = find_repetition(numbers((micro * 4 + ["clip", "adam"]) * 6))
    assert set(np.diff(positions).tolist()) == {4 * len(micro) + 2}


def test_two_alternating_networks_are_one_turn() -> None:
    cycle = [*STEP, "fake", *["conv"] * 5, "adam", "real", *["conv"] * 7, "adam"]
    assert set(np.diff(find_repetition(numbers(cycle * 5))).tolist()) == {len(cycle)}


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b"], ["a"] * 50, STEP, ["a", "b", "c", "a"]])
def test_too_little_repeats_nothing(names: list[str]) -> None:
    assert len(find_repetition(numbers(names))) <= 2


def test_a_single_repetition_of_a_step_is_no_proof() -> None:
    assert len(find_repetition(numbers(STEP * 2))) == 0


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), length=st.integers(60, 400), kinds=st.integers(3, 40))  # ten may repeat by chance
def test_a_random_sequence_repeats_nothing(seed: int, length: int, kinds: int) -> None:
    draw = random.Random(seed)
    assert len(find_repetition(np.array([draw.randrange(kinds) for _ in range(length)], np.int64))) < 4


@settings(max_examples=60)
@given(
    step=st.lists(st.integers(1, 12), min_size=3, max_size=40),
    count=st.integers(4, 12),
    head=st.integers(0, 39),
)
def test_any_step_with_one_name_of_its_own_is_found(step: list[int], count: int, head: int) -> None:
    sequence = np.array(([0, *step] * count)[min(head, len(step)) :], np.int64)
    positions = find_repetition(sequence)
    assert len(positions) >= count - 1
    for a, b in turns(positions):
        assert (len(step) + 1) % (b - a) == 0 or (b - a) % (len(step) + 1) == 0
