"""graphed_step with wrong arguments, and after its release."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from perfdoctor.errors import UsageError
from perfdoctor.treat.graph_obstacles import graph_obstacles
from perfdoctor.treat.graphed_step import graphed_step

pytestmark = pytest.mark.usefixtures("emulated")


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, torch.ones(3, 4, device="cuda"), step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_graphs": None}, "max_graphs=None"),
        ({"max_graphs": 1.5}, r"max_graphs=1\.5"),
        ({"max_graphs": True}, "max_graphs=True"),
        ({"warmup": "3"}, "warmup='3'"),
        ({"warmup": 2.5}, r"warmup=2\.5"),
        ({"warmup": 1}, "warmup=1"),
        ({"clone_outputs": "no"}, "clone_outputs='no'"),
        ({"model": 3}, "expected a torch.nn.*Module or torch.*Tensor, one or several; got a int"),
        ({"optimizer": nn.Sequential(nn.ReLU())}, "expected a torch.optim.*Optimizer, one or several; got a ReLU"),
        ({"optimizer": "adam"}, "got a str"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    model, optimizer, x, step = parts()
    with pytest.raises(UsageError, match=message):
        graphed_step(step, x, **{"model": model, "optimizer": optimizer, **options})
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.param_groups[0]["capturable"]
    if "model" in options or "optimizer" in options:
        with pytest.raises(UsageError, match=message):
            graph_obstacles(step, x, **options)


def test_a_graphed_step_is_no_train_step() -> None:
    model, optimizer, x, train_step = parts()
    step = graphed_step(train_step, x, model=model, optimizer=optimizer)
    with pytest.raises(UsageError, match="give it the train_step that this one was made from"):
        graphed_step(step, x, model=model, optimizer=optimizer)


def test_after_release_it_runs_eagerly_and_the_optimizer_stays_as_it_was() -> None:
    model, optimizer, x, step = parts()
    graphed = graphed_step(step, x, model=model, optimizer=optimizer)
    graphed(x)
    graphed.release()
    graphed.release()
    eager = graphed.num_eager
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        graphed(x)
    assert graphed.num_eager == eager + 3
    assert graphed.num_graphs == 0
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1  # not the float32 that the device had
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    assert not optimizer.param_groups[0]["capturable"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("rate", [0.1, 1e-3, 3e-4, 0.5])
def test_release_gives_back_the_rate_to_the_last_bit_or_as_it_was_scheduled(kind: Any, rate: float) -> None:
    model, _, x, _ = parts()
    optimizer = kind(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    for num_steps, expected in ((1, rate), (2, pytest.approx(rate / 2, rel=1e-6))):
        graphed = graphed_step(step, x, model=model, optimizer=optimizer)
        for _ in range(num_steps):
            graphed(x)
            if num_steps == 2:
                schedule.step()
        graphed.release()
        found = optimizer.param_groups[0]["lr"]
        assert found == expected
        assert isinstance(found, float)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_graphed_step_is_not_copied(copied: Callable[[Any], Any]) -> None:
    model, optimizer, x, step = parts()
    with pytest.raises(UsageError, match="a graphed step cannot be copied or pickled"):
        copied(graphed_step(step, x, model=model, optimizer=optimizer))
