"""The estimator: by hand, and on simulated loops whose truth is known."""

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from perfdoctor.trial.estimate import (
    Estimate,
    claimed,
    critical_rank,
    estimate,
    estimate_mean,
    paired,
    plain_means,
    steady_means,
    walsh_averages,
)
from perfdoctor.trial.schedule import BASE, Layout, lay_out


def test_a_pair_is_the_mean_of_the_neighbours_less_the_arm() -> None:
    assert paired([10.0, 12.0], [7.0, 9.0], [12.0, 14.0]).tolist() == [4.0, 4.0]


def test_walsh_averages_by_hand() -> None:
    # 1, 3, 8: the values themselves, (1+3)/2, (1+8)/2, (3+8)/2
    assert walsh_averages(np.array([3.0, 1.0, 8.0])).tolist() == [1.0, 2.0, 3.0, 4.5, 5.5, 8.0]


@pytest.mark.parametrize(("pairs", "rank"), [(5, -1), (6, 0), (7, 2), (8, 3), (10, 8), (12, 13)])
def test_the_critical_ranks_are_those_of_wilcoxons_table(pairs: int, rank: int) -> None:
    assert critical_rank(pairs) == rank  # two-sided 5 %, as in any printed table


@pytest.mark.parametrize("pairs", [6, 9])
def test_the_critical_rank_counts_every_choice_of_signs(pairs: int) -> None:
    sums = [sum(r for r, taken in zip(range(1, pairs + 1), signs, strict=True) if taken)
            for signs in product((0, 1), repeat=pairs)]  # fmt: skip
    rank = critical_rank(pairs)
    assert np.mean(np.array(sums) <= rank) <= 0.025 < np.mean(np.array(sums) <= rank + 1)


def test_one_wild_block_does_not_move_the_estimate() -> None:
    calm = estimate([5.0, 5.1, 4.9, 5.0, 5.2, 4.8, 5.0, 5.1])
    wild = estimate([5.0, 5.1, 4.9, 5.0, 5.2, 4.8, 5.0, 500.0])
    assert calm.mid_ns == pytest.approx(5.0)
    assert wild.mid_ns == pytest.approx(5.05, abs=0.1)
    assert wild.certain


def test_five_pairs_claim_nothing() -> None:
    few = estimate([5.0, 5.0, 5.0, 5.0, 5.0])
    assert few.mid_ns == 5.0
    assert not few.certain


def test_no_pair_is_an_error() -> None:
    with pytest.raises(ValueError, match="no pair"):
        estimate([])


def test_what_happens_in_one_block_of_ten_is_seen_by_the_mean_only() -> None:
    rare = [0.0, 0.0, 0.0, 40.0, 0.0, 0.0, 0.0, 0.0, 0.0, 40.0, 0.0, 0.0]
    assert estimate(rare).mid_ns == 0.0
    assert estimate_mean(rare).mid_ns == pytest.approx(80 / 12)


def simulated(saving: float, seed: int, *, rounds: int = 12, arms: int = 3) -> NDArray[np.float64]:
    """Differences of arm 0 on a noisy host, steps of 25 ms: a drift of 20 %, 1 % noise, a hiccup of 30 ms in 1 %."""
    rng = np.random.default_rng(seed)
    blocks = Layout(counted=8, edges=(3,) * arms, base_edges=(3,) * arms, rounds=rounds, extra=0).blocks()
    timed = []
    for i, block in enumerate(blocks):
        step = 25.0 * (1 + 0.2 * i / len(blocks)) - saving * (block.arm == 0)
        steps = step * (1 + 0.01 * rng.standard_t(3, block.counted))
        timed.append((block.arm, steps + 30.0 * (rng.random(block.counted) < 0.01)))
    times = steady_means(timed)
    at = [i for i, (arm, _) in enumerate(times) if arm == 0]
    assert all(times[i - 1][0] == times[i + 1][0] == BASE for i in at)
    return paired([times[i - 1][1] for i in at], [times[i][1] for i in at], [times[i + 1][1] for i in at])


def test_never_over_three_percent_where_there_is_nothing() -> None:
    found = [estimate(simulated(0.0, seed)) for seed in range(300)]
    assert not [e for e in found if e.certain and abs(e.mid_ns) > 0.03 * 25]
    assert np.mean([e.certain for e in found]) < 0.1


@pytest.mark.parametrize("rounds", [8, 12])
def test_five_percent_is_always_found(rounds: int) -> None:
    found = [estimate(simulated(0.05 * 25, seed, rounds=rounds)) for seed in range(300)]
    assert min(e.low_ns for e in found) > 0
    assert np.median([abs(e.mid_ns - 0.05 * 25) for e in found]) < 0.005 * 25


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    held = [(e := estimate(simulated(1.0, seed))).low_ns <= 1.0 <= e.high_ns for seed in range(400)]
    assert np.mean(held) > 0.9  # neighbouring pairs share a base block


def test_a_stall_in_every_fourth_step_counts_and_a_single_hiccup_does_not() -> None:
    stalling = np.array([10.0, 10.0, 10.0, 50.0] * 2)
    quiet = np.array([10.0] * 8)
    hiccup = np.array([10.0] * 7 + [90.0])
    blocks = [(BASE, stalling), (0, quiet), (BASE, stalling), (0, hiccup), (BASE, stalling), (0, quiet)]
    assert [mean for _, mean in steady_means(blocks)] == [20.0, 10.0, 20.0, 10.0, 20.0, 10.0]
    assert plain_means(blocks)[3] == (0, 20.0)


STEP_MS = 29.0


def host_steps(rng: np.random.Generator, num_steps: int) -> NDArray[np.float64]:
    """Steps of 29 ms on a wandering host: its speed drifts by 3 % within a second (AR(1)), it is 20 % slower for some
    300 ms at a time, steps scatter by 1.5 % with heavy tails, and one in a hundred is held up for 30 ms."""
    memory = np.exp(-STEP_MS / 1000)
    pushes = 0.03 * np.sqrt(1 - memory**2) * rng.standard_normal(num_steps)
    drift = autoregressive(pushes, memory)
    slow = np.cumsum(rng.random(num_steps) < STEP_MS / 300) % 2
    scatter = 1 + 0.015 * np.clip(rng.standard_t(3, num_steps), -8, 8)
    return STEP_MS * (1 + drift) * (1 + 0.2 * slow) * scatter + 30 * (rng.random(num_steps) < 0.01)


def autoregressive(pushes: NDArray[np.float64], memory: float) -> NDArray[np.float64]:
    """x[i] = memory x[i - 1] + pushes[i]."""
    kernel = memory ** np.arange(300)
    return np.asarray(np.convolve(pushes, kernel)[: len(pushes)], np.float64)


def wandering(saving: float, seed: int, *, seconds: float, arms: int = 1) -> tuple[Estimate, float]:
    """What a trial of so many seconds says of arm 0, which saves `saving` ms, and the base step."""
    layout = lay_out(32e6, [1] * arms, [1] * arms, max_steps=10**6, max_ns=seconds * 1e9)
    steps = host_steps(np.random.default_rng(seed), layout.steps)
    at, blocks = 0, []
    for block in layout.blocks():
        blocks.append((block.arm, steps[at + block.edge : at + block.steps] - saving * (block.arm == 0)))
        at += block.steps
    times = steady_means(blocks)
    mine = [i for i, (arm, _) in enumerate(times) if arm == 0]
    pairs = paired([times[i - 1][1] for i in mine], [times[i][1] for i in mine], [times[i + 1][1] for i in mine])
    base = float(np.median([ns for arm, ns in times if arm == BASE]))
    return claimed(estimate(pairs), base), base


@pytest.mark.parametrize(("seconds", "arms"), [(15, 1), (60, 2)])
@pytest.mark.parametrize("truth", [0.0, 0.008])
def test_on_a_wandering_host_no_large_claim_is_made_of_nothing(truth: float, seconds: float, arms: int) -> None:
    found = [wandering(truth * STEP_MS, seed, seconds=seconds, arms=arms) for seed in range(500)]
    assert not [measured for measured, base in found if measured.certain and abs(measured.mid_ns) > 0.03 * base]


def test_on_a_wandering_host_five_percent_is_found_in_the_time_of_the_command() -> None:
    found = [wandering(0.05 * 1.1 * STEP_MS, seed, seconds=120) for seed in range(200)]
    assert all(measured.low_ns > 0 for measured, _ in found)
    errors = [abs(measured.mid_ns - 0.05 * 1.1 * STEP_MS) / base for measured, base in found]
    assert np.median(errors) < 0.005
    assert max(errors) < 0.02


def test_the_interval_holds_the_truth_on_a_wandering_host_too() -> None:
    held = [(e := wandering(1.0, seed, seconds=40)[0]).low_ns <= 1.0 <= e.high_ns for seed in range(200)]
    assert np.mean(held) > 0.92


@pytest.mark.parametrize(
    ("low", "mid", "high", "kept"),
    [
        (0.1, 0.4, 0.7, False),  # below half a percent of 100
        (0.2, 1.0, 1.8, True),
        (0.5, 4.0, 7.5, False),  # one in a thousand might be nothing
        (3.0, 5.0, 7.0, True),
        (-1.0, 2.0, 5.0, True),  # claims nothing as it is
        (-7.0, -5.0, -3.0, True),
        (-7.5, -4.0, -0.5, False),
    ],
)
def test_what_is_claimed(low: float, mid: float, high: float, kept: bool) -> None:
    measured = Estimate(mid_ns=mid, low_ns=low, high_ns=high, num_pairs=20)
    after = claimed(measured, 100.0)
    assert (after == measured) == kept
    assert kept or (after.low_ns <= 0 <= after.high_ns and after.mid_ns == mid)
