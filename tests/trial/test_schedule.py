"""The order of the blocks, by hand."""

from dataclasses import replace

import pytest

from perfdoctor.trial.schedule import BASE, Block, Layout, counted_steps, lay_out, order


def test_rounds_alternate_in_direction() -> None:
    assert order(3, 3) == [0, 1, 2, 2, 1, 0, 0, 1, 2]


def test_every_arm_stands_between_two_base_blocks() -> None:
    arms = [block.arm for block in Layout(counted=8, edges=(3, 3), base_edges=(3, 3), rounds=2).blocks()]
    assert arms == [BASE, 0, BASE, 1, BASE, 1, BASE, 0, BASE]


def test_behind_an_arm_with_a_queue_the_base_block_counts_later() -> None:
    layout = Layout(counted=4, edges=(3, 5), base_edges=(1, 17), rounds=1, arm_counted=(4, 20), extra=0)
    blocks = layout.blocks()
    assert blocks == (
        Block(arm=BASE, edge=3, counted=4),
        Block(arm=0, edge=3, counted=4),
        Block(arm=BASE, edge=1, counted=4),
        Block(arm=1, edge=5, counted=20),
        Block(arm=BASE, edge=17, counted=4),
    )
    assert sum(block.steps for block in blocks) == 7 + 7 + 5 + 25 + 21


@pytest.mark.parametrize("period", [2, 5, 7, 10, 11, 12, 50])
def test_what_comes_every_so_many_steps_meets_both_arms_alike(period: int) -> None:
    blocks = Layout(counted=4, edges=(1,), base_edges=(1,), rounds=300).blocks()
    step, met = 0, {BASE: 0, 0: 0}
    for block in blocks:
        for number in range(block.steps):
            met[block.arm] += number >= block.edge and (step + number) % period == 0
        step += block.steps
    assert abs(met[0] / 300 - met[BASE] / 301) < 0.15 * 4 / period + 0.02  # of 4 / period expected in each


def test_an_arm_comes_on_average_at_the_same_time_as_another() -> None:
    arms = order(4, 12)
    centres = {arm: sum(i for i, each in enumerate(arms) if each == arm) / 12 for arm in range(4)}
    assert set(centres.values()) == {23.5}


@pytest.mark.parametrize(
    ("step_ms", "multiple", "steps"),
    [
        (25.0, 1, 4),
        (15.0, 1, 4),
        (14.0, 1, 8),
        (5.0, 1, 12),
        (1.0, 1, 60),
        (0.01, 1, 200),
        (500.0, 1, 4),
        (25.0, 10, 20),
        (1.0, 10, 60),
        (4.0, 8, 16),
    ],
)
def test_a_block_lasts_sixty_milliseconds_and_whole_cycles_of_the_batches(
    step_ms: float, multiple: int, steps: int
) -> None:
    assert counted_steps(step_ms * 1e6, multiple=multiple) == steps


@pytest.mark.parametrize(("max_steps", "max_s"), [(300, 100.0), (100_000, 7.0), (25, 100.0), (33, 100.0)])
def test_as_many_rounds_as_fit_into_the_steps_and_the_time(max_steps: int, max_s: float) -> None:
    layout = lay_out(10e6, [3], [1], max_steps=max_steps, max_ns=max_s * 1e9)
    more = replace(layout, rounds=layout.rounds + 1)
    most = min(max_steps, max_s * 100)
    assert layout.steps <= most < more.steps


def test_one_arm_may_have_longer_blocks_than_the_others() -> None:
    layout = lay_out(25e6, [1, 1], [1, 1], max_steps=1000, max_ns=1e12, multiples=[1, 10])
    assert layout.arm_counted == (4, 20)
    assert layout.counted == 4


def test_no_arms_no_blocks() -> None:
    assert lay_out(10e6, [], [], max_steps=100, max_ns=1e12).blocks() == ()
