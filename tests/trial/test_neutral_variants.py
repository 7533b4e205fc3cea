"""Suspects in the forms that scripts write them in, on the emulated device: the same numbers, or a reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from suspect_trials import STALL, finding, run, trial_of
from torch import nn

from perfdoctor.trial.outcome import TrialOutcome


def tried(device: Any, step: Callable[[int], None], marker: str, code: str, kind: str) -> TrialOutcome:
    return run(device, trial_of([finding(__file__, marker, code, kind)]), step)


def saved(outcome: TrialOutcome, mode: str = "gone") -> int:
    assert [arm.mode for arm in outcome.arms].count(mode) == 1, outcome.refused
    return next(arm.saving.median_ns for arm in outcome.arms if arm.mode == mode)


SIZED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nonzero": lambda mask: mask.nonzero(),  # nonzero
    "where": lambda mask: torch.where(mask)[0],  # where
    "argwhere": lambda mask: torch.argwhere(mask),  # argwhere
    "unique": lambda mask: torch.unique(mask),  # unique
}


@pytest.mark.parametrize("name", list(SIZED))
def test_a_result_of_fixed_size_is_that_of_before(device: Any, name: str) -> None:
    mask = torch.tensor([True, False, True, False]).cuda()
    shapes = set()
    outcome = tried(device, lambda _: shapes.add(SIZED[name](mask).shape), name, "host-sync", "nonzero")
    assert saved(outcome) >= STALL
    assert len(shapes) == 1


@pytest.mark.parametrize("name", ["nonzero", "where", "argwhere"])
def test_a_result_of_changing_size_is_refused(device: Any, name: str) -> None:
    masks = [(torch.arange(4) < size).cuda() for size in (1, 3)]
    sizes = []
    outcome = tried(
        device, lambda number: sizes.append(len(SIZED[name](masks[number % 2]))), name, "host-sync", "nonzero"
    )
    assert not outcome.arms
    assert "another size each time" in outcome.refused[0].why
    assert sizes == [(1, 3)[i % 2] for i in range(len(sizes))]  # never answered with a stale one


def test_a_read_once_in_ten_steps_is_an_arm_of_its_own(device: Any) -> None:
    seen = []

    def step(number: int) -> None:
        value = torch.tensor(float(number)).cuda()
        seen.append(value.item())  # often

    outcome = tried(device, step, "often", "host-sync", "item")
    assert saved(outcome) == STALL
    assert saved(outcome, "every") == 90  # nine of ten
    (sparse,) = [arm for arm in outcome.arms if arm.mode == "every"]
    assert "read every 10 steps" in sparse.text
    assert not sparse.prediction
    assert max(number - value for number, value in enumerate(seen)) < 40  # no staler than a block is long


def test_a_loggers_call_is_skipped_with_its_reads(device: Any, tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    calls = []
    writer._get_file_writer().add_summary = lambda *_: calls.append(1)  # type: ignore[method-assign, union-attr]
    steps = []

    def step(number: int) -> None:
        steps.append(number)
        writer.add_scalar("loss", torch.tensor(1.0).cuda(), number)  # logger

    try:
        outcome = tried(device, step, "logger", "host-sync", "logging")
    finally:
        writer.close()
    assert saved(outcome) == STALL
    (arm,) = [arm for arm in outcome.arms if arm.mode == "gone"]
    assert "not called" in arm.text
    assert 0 < len(calls) < len(steps)


Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def in_two_calls(pairs: Pairs) -> None:
    for mine, p in pairs:
        mine.mul_(0.9).add_(p.detach(), alpha=0.1)  # in_two_calls


def by_data(pairs: Pairs) -> None:
    for mine, p in pairs:
        mine.data.mul_(0.9)  # by_data
        mine.data.add_(p.data, alpha=0.1)


def by_lerp(pairs: Pairs) -> None:
    for mine, p in pairs:
        mine.lerp_(p.detach(), 0.1)  # by_lerp


def by_copy(pairs: Pairs) -> None:
    for mine, p in pairs:
        mine.copy_(mine * 0.9 + p * 0.1)  # by_copy


def of_one(mine: torch.Tensor, p: torch.Tensor) -> None:
    mine.mul_(0.9).add_(p.detach(), alpha=0.1)  # in_a_function


def in_a_function(pairs: Pairs) -> None:
    for mine, p in pairs:
        of_one(mine, p)


@pytest.mark.parametrize("way", [in_two_calls, by_data, by_lerp, by_copy, in_a_function])
def test_an_average_by_hand_in_its_usual_forms(device: Any, way: Callable[[Pairs], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to("cuda")
    shadow = [p.detach().clone() for p in model.parameters()]
    expected = [p.detach().clone() for p in model.parameters()]

    def step(number: int) -> None:
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.999)
            way(list(zip(shadow, model.parameters(), strict=True)))
            torch._foreach_lerp_(expected, [p.detach() for p in model.parameters()], 0.1)

    outcome = tried(device, step, way.__name__, "gradient-loop", "launch_bound")
    if way is by_copy:
        assert not outcome.arms
        assert "other tensors or numbers" in outcome.refused[0].why
    else:
        assert [arm.mode for arm in outcome.arms] == ["multi-tensor"], outcome.refused
    for mine, other in zip(shadow, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), other.cpu(), rtol=1e-4, atol=1e-6)
