"""The order of the blocks, by hand."""

import pytest

from perfdoctor.trial.schedule import BASE, Block, Layout, counted_steps, lay_out, order


def test_rounds_alternate_in_direction() -> None:
    assert order(3, 3) == [0, 1, 2, 2, 1, 0, 0, 1, 2]


def test_every_arm_stands_between_two_base_blocks() -> None:
    arms = [block.arm for block in Layout(counted=8, edges=(3, 3), base_edges=(3, 3), rounds=2).blocks()]
    assert arms == [BASE, 0, BASE, 1, BASE, 1, BASE, 0, BASE]


def test_behind_an_arm_with_a_queue_the_base_block_counts_later() -> None:
    blocks = Layout(counted=4, edges=(3, 5), base_edges=(3, 19), rounds=1).blocks()
    assert blocks == (
        Block(arm=BASE, edge=3, counted=4),
        Block(arm=0, edge=3, counted=4),
        Block(arm=BASE, edge=3, counted=4),
        Block(arm=1, edge=5, counted=4),
        Block(arm=BASE, edge=19, counted=4),
    )
    assert sum(block.steps for block in blocks) == 7 + 7 + 7 + 9 + 23


def test_an_arm_comes_on_average_at_the_same_time_as_another() -> None:
    arms = order(4, 12)
    centres = {arm: sum(i for i, each in enumerate(arms) if each == arm) / 12 for arm in range(4)}
    assert set(centres.values()) == {23.5}


@pytest.mark.parametrize(
    ("step_ms", "multiple", "steps"),
    [
        (25.0, 1, 8),
        (5.0, 1, 12),
        (1.0, 1, 60),
        (0.01, 1, 200),
        (100.0, 1, 8),
        (500.0, 1, 4),
        (25.0, 10, 10),
        (1.0, 10, 60),
        (4.0, 10, 20),
    ],
)
def test_a_block_lasts_sixty_milliseconds(step_ms: float, multiple: int, steps: int) -> None:
    assert counted_steps(step_ms * 1e6, multiple=multiple) == steps


def test_rounds_fit_into_the_steps_and_the_time() -> None:
    # A round of one arm: base 3 + 8, arm 3 + 8; one more base block at the end.
    def rounds(max_steps: int, max_s: float) -> int:
        return lay_out(10e6, [3], [3], max_steps=max_steps, max_ns=max_s * 1e9).rounds

    assert rounds(22 * 5 + 11, 100) == 5
    assert rounds(22 * 5 + 10, 100) == 4
    assert rounds(10_000, 0.01 * (22 * 7 + 11)) == 7
    assert rounds(10_000, 100) == 16
    assert rounds(20, 100) == 0


def test_no_arms_no_blocks() -> None:
    assert lay_out(10e6, [], [], max_steps=100, max_ns=1e12).blocks() == ()
