"""Parity of losses: what is allowed, what a loop differs from itself by, and what comes by chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from treatment_runs import run_trial

from perfdoctor.treat.treatment import Loop, Numerics, Treatment
from perfdoctor.trial.parity import Allowed, Parity, is_doubtful, is_open, judge_parity, pooled
from perfdoctor.trial.treatment_time import TreatmentLimits


@pytest.mark.parametrize(
    ("bases", "treated", "rtol", "kept"),
    [
        ([[1.0, 2.0], [1.0, 2.0]], [1.0, 2.0], 0.0, True),
        ([[1.0, 2.0], [1.0, 2.0]], [1.0, 2.001], 0.0, False),
        ([[1.0, 2.0], [1.0, 2.0]], [1.0, 2.001], 1e-3, True),
        # Within twice what the loop differs from itself by.
        ([[1.0, 2.0], [1.0, 2.001]], [1.0, 2.0015], 0.0, True),
        ([[1.0, 2.0], [1.0, 2.0], [1.0, 2.001]], [1.0, 2.0015], 0.0, True),
        ([[1.0, 2.0], [1.0, 2.001], [1.0, 1.9995]], [1.0, 2.0035], 0.0, False),  # 0.0015 apart, twice that allowed
        ([[1.0, 2.0], [1.0, 2.001], [1.0, 1.9995]], [1.0, 2.0025], 0.0, True),
        ([[1.0], [1.0]], [math.nan], 1.0, False),
        ([[1.0, math.nan], [1.0, math.nan]], [1.0, math.nan], 0.0, True),
        ([[1.0, math.nan], [1.0, math.nan]], [math.nan, 1.0], 1.0, False),
        ([[math.nan], [math.nan]], [math.nan], 0.0, None),  # equal to everything
        ([[1.0], [1.0]], [1.0, 2.0], 0.0, None),
        ([[1.0], [1.0, 2.0]], [1.0], 0.0, None),
        ([[], []], [], 0.0, None),
        # Other batches each time: nothing can be said. Of ten classes they differ by 2 %, far below a wrong model.
        ([[2.30, 2.31], [2.30, 2.35]], [2.30, 2.37], 1e-4, None),
        ([[2.30, 2.31], [2.30, 2.35]], [2.30, 2.37], 0.05, True),  # but within what is allowed anyway
    ],
)
def test_parity(bases: list[list[float]], treated: list[float], rtol: float, kept: bool | None) -> None:
    assert judge_parity(bases, treated, Allowed(rtol=rtol)).kept is kept


def test_parity_text_of_a_bitwise_claim() -> None:
    unequal = judge_parity([[1.0, 2.0], [1.0, 2.0]], [1.0, 2.5], Allowed())
    assert (unequal.kept, unequal.text) == (False, "losses not equal bit for bit: largest difference 0.5")
    # Its own runs differ by 2**-20: twice that is allowed.
    noisy = judge_parity([[1.0, 2.0], [1.0, 2.0 + 2**-20]], [1.0, 2.0 + 2**-19], Allowed())
    assert noisy.kept
    assert noisy.text.startswith("losses differ as those of the loop itself do: largest difference 1.91e-06")


def test_parity_text_of_a_tolerance() -> None:
    bases = [[1.0, 2.0], [1.0, 2.001]]
    assert judge_parity(bases, [1.0, 2.0002], Allowed(rtol=1e-4, why="sums")).text == (
        "losses within rtol 0.0001 (sums): largest difference 0.0002; the loop differs from itself by 0.001"
    )
    beyond = judge_parity(bases, [1.0, 2.0015], Allowed(rtol=1e-4, why="sums"))
    assert beyond.kept
    assert beyond.text.startswith("losses differ as those of the loop itself do")  # not within 0.0002


def test_other_draws_excuse_other_losses_and_nothing_else() -> None:
    bases, drawn = [[1.0, 2.0], [1.0, 2.0]], Allowed(other_draws="workers draw others")
    other = judge_parity(bases, [1.1, 2.0], drawn)
    assert (other.kept, other.text) == (None, "losses differ by 0.1: workers draw others")
    assert other.excuse
    same = judge_parity(bases, [1.0, 2.0], drawn)
    assert (same.kept, same.excuse) == (True, "")


@pytest.mark.parametrize(
    ("treated", "doubtful"),
    [([1.0, 2.0], False), ([1.0, 2.001], True), ([1.0, 2.0039], True), ([1.0, 2.005], False), ([1.0, math.nan], False)],
)
def test_a_large_difference_is_never_the_loop_s_own(treated: list[float], doubtful: bool) -> None:
    base = [1.0, 2.0]  # a loop that differs from itself by over 0.002 is not compared; twice that is allowed at most
    assert is_doubtful(judge_parity([base, base], treated, Allowed()), base) is doubtful


OFF = Parity(kept=False, text="losses not equal bit for bit: largest difference 0.001", difference=0.001, repeat=0.0)
SAME = Parity(kept=True, text="losses equal bit for bit", difference=0.0, repeat=0.0)
FAR = Parity(kept=False, text="losses not equal bit for bit: largest difference 1", difference=1.0, repeat=0.0)


@pytest.mark.parametrize(
    ("runs", "goes_on", "kept"),
    [
        ([SAME], False, True),
        ([FAR], False, False),  # no chance does that
        ([OFF], True, None),
        ([OFF, SAME], True, None),
        ([OFF, OFF], True, None),
        ([OFF, SAME, OFF], True, None),
        ([OFF, SAME, SAME], False, True),
        ([OFF, OFF, OFF, SAME], True, None),
        ([OFF, OFF, OFF, OFF], False, False),
        ([OFF, OFF, OFF, SAME, OFF], False, False),
        ([OFF, OFF, OFF, SAME, SAME], False, True),
        ([OFF, Parity(kept=None, text="8 losses without, 7 with the treatment")], False, None),
        ([OFF, FAR], False, False),
    ],
)
def test_a_small_difference_is_looked_for_in_more_runs(runs: list[Parity], goes_on: bool, kept: bool | None) -> None:
    assert is_open(runs, [1.0, 2.0]) is goes_on
    assert pooled(runs, [1.0, 2.0]).kept is kept


def test_how_many_runs_differed_is_said() -> None:
    base = [1.0, 2.0]
    by_chance = pooled([OFF, SAME, SAME], base)
    assert by_chance.text == "losses differ by chance: largest difference 0.001, in 1 of 3 runs with the treatment"
    assert (by_chance.difference, by_chance.repeat) == (0.001, 0.0)
    assert pooled([OFF] * 4, base).text == "losses not equal bit for bit: largest difference 0.001; in 4 of 4 runs"
    assert pooled([OFF], base).text == (
        "losses differ, perhaps by chance: largest difference 0.001, in 1 of 1 run with the treatment; "
        "more runs would tell (--seconds)"
    )
    assert pooled([SAME], base) is SAME


def _shaky(steps: int, shaken: Callable[[int], bool]) -> Callable[[], None]:
    """A script whose losses are another in some of its steps, as those of kernels that add in no fixed order."""

    def train() -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for step in range(steps):
            loss = model(torch.ones(2, 4)).square().mean() + 1.0
            (loss * (1 + 2.0**-20 if shaken(step) else 1)).backward()
            optimizer.step()

    return train


TREATED = {"on": 0}  # times that the treatment was begun; 0 while it is off
_BEGUN = {"times": 0}


@contextmanager
def _noted(loop: Loop) -> Iterator[Loop]:
    _BEGUN["times"] += 1
    TREATED["on"] = _BEGUN["times"]
    try:
        yield loop
    finally:
        TREATED["on"] = 0


def _parity(shaken: Callable[[int], bool]) -> Parity:
    """Of a treatment that claims equal bits. `shaken(step)`: whether the loss is another by some bits."""
    _BEGUN["times"] = 0
    noted = Treatment(
        name="noted", cures=(), numerics=Numerics(), refuses=lambda _: None, applied=_noted, lines=("line",)
    )
    limits = TreatmentLimits(seconds=30, rounds=6)
    (verdict,) = run_trial([noted], _shaky(10**6, shaken), limits, failures_told=True).verdicts
    return verdict.parity


def test_a_loop_that_repeats_itself_only_by_chance_is_run_as_it_is_more_often() -> None:
    # Ten steps are looked at; eight are treated, two times eight are not, and differ from those; then eight that agree.
    parity = _parity(lambda step: 10 <= step < 18 or step >= 34)
    assert parity.kept, parity.text
    assert parity.text.startswith("losses differ as those of the loop itself do")
    assert parity.repeat == parity.difference
    assert parity.repeat


def test_a_loop_that_repeats_itself_holds_the_treatment_to_its_bits() -> None:
    parity = _parity(lambda _: TREATED["on"] > 0)
    assert parity.kept is False
    assert parity.repeat == 0
    assert parity.text.endswith("in 4 of 4 runs")


def test_a_treated_loop_that_differs_once_by_chance_is_not_accused() -> None:
    """As `set_to_none` on an H200: five untreated runs equal bit for bit, the treated one another by 2.3e-5."""
    parity = _parity(lambda _: TREATED["on"] == 1)
    assert parity.kept
    assert parity.repeat == 0
    assert parity.text.startswith("losses differ by chance: ")
    assert parity.text.endswith("in 1 of 3 runs with the treatment")
