"""A NonFiniteWatch whose model changes under it, and updates that are skipped before there was any."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from nonfinite_loops import model_on
from torch import nn

from perfdoctor.errors import TreatmentRefused, UsageError
from perfdoctor.treat.module_tree import ModuleTree
from perfdoctor.treat.nonfinite import NonFiniteWatch
from perfdoctor.treat.nonfinite_hits import NonFiniteHit


@pytest.fixture
def device(computing_device: str) -> str:
    return computing_device


def _replace(model: nn.Sequential, device: str) -> None:
    model[2] = nn.Linear(4, 1).to(device)


def _append(model: nn.Sequential, device: str) -> None:
    model.append(nn.Linear(1, 1).to(device))


def _assign(model: nn.Sequential, device: str) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def _register(model: nn.Sequential, device: str) -> None:
    model[2].weight = nn.Parameter(torch.ones(1, 4, device=device))  # type: ignore[union-attr]


def _reparametrize(model: nn.Sequential, device: str) -> None:
    torch.nn.utils.parametrizations.weight_norm(model[2])


CHANGES = [_replace, _append, _assign, _register, _reparametrize]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("hooked", [False, True])
def test_parameters_that_take_the_place_of_others_are_watched(
    device: str, hooked: bool, change: Callable[[nn.Sequential, str], None]
) -> None:
    model = model_on(device)
    hits: list[NonFiniteHit] = []
    watch = NonFiniteWatch(model, on_hit=hits.append)
    if hooked:
        watch.__enter__()
    _step(model, torch.optim.SGD(model.parameters(), lr=0.1), watch, hooked)
    known = {id(parameter) for parameter in model.parameters()}
    change(model, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name, last = [(name, p) for name, p in model.named_parameters() if id(p) not in known][-1]
    _step(model, optimizer, watch, hooked)
    _step(model, optimizer, watch, hooked, spoilt=last)
    watch.__exit__(None, None, None) if hooked else watch.finish()
    assert [(hit.step, hit.parameter) for hit in hits] == [(3, name)]


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, watch: NonFiniteWatch, hooked: bool,
    spoilt: torch.Tensor | None = None,
) -> None:  # fmt: skip
    device = next(model.parameters()).device
    loss = model(torch.ones(2, 3).to(device)).square().mean()
    loss.backward()
    if spoilt is not None:
        assert spoilt.grad is not None
        spoilt.grad.view(-1)[0] = float("nan")
    watch.check(loss)
    if hooked:
        optimizer.step()
    model.zero_grad()
    watch.step()


def test_a_tree_is_current_until_a_member_is_another() -> None:
    for change in CHANGES:
        model = model_on("cpu")
        tree = ModuleTree([model])
        model(torch.ones(1, 3)).sum().backward()
        model.to(torch.float64).requires_grad_(False).eval()
        model.load_state_dict(model.state_dict())
        assert tree.is_current
        change(model, "cpu")
        assert not tree.is_current
    model = nn.Sequential(nn.Linear(1, 1), nn.ModuleList(), nn.ReLU())
    for index in range(3):  # none of them had a child
        tree = ModuleTree([model])
        model[index].add_module("0", nn.Identity())
        assert not tree.is_current
    model = nn.Sequential(nn.LazyLinear(3))
    tree = ModuleTree([model])
    model(torch.ones(1, 2))
    assert tree.is_current


@pytest.mark.usefixtures("memory_as_found")
@pytest.mark.parametrize("options", [{}, {"nesterov": True, "weight_decay": 0.1}, {"maximize": True}])
def test_a_first_update_that_is_skipped_comes_as_the_first_one_later(
    device: str, options: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    trained = []
    for num_bad in (0, 2):
        model = model_on(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True, **options)  # type: ignore[arg-type]
        with caplog.at_level(logging.ERROR), NonFiniteWatch(model, on_hit="skip") as watch:
            for step in range(num_bad + 3):
                model(torch.full((2, 3), 1.0 + max(0, step - num_bad)).to(device)).square().mean().backward()
                if step < num_bad:
                    model[0].weight.grad[0, 0] = float("inf")  # type: ignore[union-attr,index]
                optimizer.step()
                optimizer.zero_grad()
                watch.step()
        momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
        trained.append([tensor.detach().cpu() for tensor in (*model.parameters(), *momentum)])
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))


def test_a_first_update_with_dampening_cannot_be_skipped() -> None:
    model = model_on("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, fused=True)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(TreatmentRefused, match="take one step before"), NonFiniteWatch(model, on_hit="skip"):
        optimizer.step()
    optimizer.step()
    with NonFiniteWatch(model, on_hit="skip"):  # nothing of the refused one is left
        optimizer.step()
    assert not hasattr(optimizer, "found_inf")


def test_what_would_never_be_called_and_lags_without_memory_are_named() -> None:
    model = model_on("cpu")
    with pytest.raises(UsageError, match=r"RuntimeError.*a function"):
        NonFiniteWatch(model, on_hit=RuntimeError)  # type: ignore[arg-type]
    for lag in (10**12, 10_001):
        with pytest.raises(UsageError, match="0 to 10000"):
            NonFiniteWatch(model, max_lag=lag)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_loss_of_eight_bits(device: str, shape: tuple[int, ...]) -> None:
    hits: list[NonFiniteHit] = []
    watch = NonFiniteWatch(model_on(device), on_hit=hits.append)
    for value in (1.0, float("nan")):
        watch.check(torch.full(shape, value, device=device).to(torch.float8_e4m3fn))
        watch.step()
    watch.finish()
    assert [hit.step for hit in hits] == [2]
