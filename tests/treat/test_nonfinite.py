"""Non-finite losses and gradients: found on the device, told by parameter and step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nonfinite_loops import model_on, sent, spoil, train
from torch import nn

from perfdoctor.errors import NonFiniteError
from perfdoctor.treat.nonfinite import NonFiniteWatch
from perfdoctor.treat.nonfinite_hits import NonFiniteHit
from perfdoctor.watch.sync_guard import sync_guard


@pytest.fixture
def device(computing_device: str) -> str:
    return computing_device


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("by_hand", [True, False])
def test_the_parameter_and_the_step_are_named(device: str, value: float, by_hand: bool) -> None:
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = NonFiniteWatch(model)
    message = r"step 3: the gradient of 2\.weight: 2 values are not finite"

    def spoiled(step: int) -> None:
        if step == 3:
            spoil(model[2].weight, value, 2)

    with sync_guard(budget=0), pytest.raises(NonFiniteError, match=message):  # noqa: PT012
        if by_hand:
            train(model, optimizer, device, watch, 5, spoiled)
        with watch:
            train(model, optimizer, device, watch, 5, spoiled)
    assert watch.num_waits == 0
    (hit,) = watch.hits
    assert (hit.step, hit.parameter, hit.num_values, hit.num_parameters, hit.skipped) == (3, "2.weight", 2, 1, False)


def test_the_loss_is_checked(device: str) -> None:
    watch = NonFiniteWatch(model_on(device))
    for loss in (1.0, torch.ones((), device=device), torch.ones(4, device=device), torch.tensor(2), None):
        watch.check(loss)
        watch.step()
    for bad in (math.nan, torch.full((), math.inf, device=device), torch.tensor([1.0, math.nan, 2.0]).to(device)):
        watch.check(bad)
        with pytest.raises(NonFiniteError, match=f"step {6 + len(watch.hits)}: the loss is not finite"):
            watch.step()
    watch.step()
    assert [hit.step for hit in watch.hits] == [6, 7, 8]


def test_every_bad_step_is_called_back(device: str) -> None:
    model, found = model_on(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch = NonFiniteWatch(model, optimizer, on_hit=found.append)

    def spoiled(step: int) -> None:
        if step in (2, 5):
            spoil(model[0].bias, math.inf)
            spoil(model[2].bias, math.inf)

    with watch:
        train(model, optimizer, device, watch, 6, spoiled)
    # 0 times inf spoils the parameter, so that all later losses are bad too
    assert [hit.step for hit in found] == [2, 3, 4, 5, 6]
    assert found[0].parameter == "0.bias"
    assert found[0].num_parameters == 2
    assert found[1].parameter is None
    assert found == list(watch.hits)


@settings(max_examples=30)
@given(
    st.lists(st.dictionaries(st.integers(0, 5), st.integers(1, 4), max_size=3), min_size=1, max_size=6),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
def test_any_gradients(steps: list[dict[int, int]], value: float, dtype: torch.dtype) -> None:
    """Each step: parameter -> how many of its values are bad. Some parameters have no gradient in some steps."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(index + 4, dtype=dtype)) for index in range(6)])
    found: list[NonFiniteHit] = []
    watch = NonFiniteWatch(model, on_hit=found.append)
    expected = []
    for number, bad in enumerate(steps, start=1):
        for index, parameter in enumerate(model):
            parameter.grad = None if index % 2 and index not in bad else torch.full_like(parameter, 0.5).detach()
            if index in bad:
                spoil(parameter, value, bad[index])
        watch.check()
        watch.step()
        if bad:
            expected.append((number, str(min(bad)), bad[min(bad)], len(bad)))
    assert [(hit.step, hit.parameter, hit.num_values, hit.num_parameters) for hit in found] == expected


def test_sparse_missing_and_shared_gradients(device: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.unused = nn.Linear(2, 2)
            self.first = nn.Linear(4, 4, bias=False)
            self.again = self.first

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.again(self.first(self.table(index))).sum()

    model = Model().to(device)
    index = sent(torch.tensor([1, 3, 3]), device)
    sparse = torch.optim.SparseAdam(model.table.parameters())
    dense = torch.optim.Adam(model.first.parameters())
    with sync_guard(budget=0):
        by_hand = NonFiniteWatch(model)
        model(index).backward()
        by_hand.check()
        by_hand.step()
        model.table.weight.grad._values()[1].fill_(math.inf)  # type: ignore[union-attr]
        by_hand.check()
        with pytest.raises(NonFiniteError, match=r"step 2: the gradient of table\.weight: 4 values"):
            by_hand.step()
    with NonFiniteWatch(model) as watch:
        dense.step()
        with pytest.raises(NonFiniteError, match=r"step 1: the gradient of table\.weight"):  # noqa: PT012
            sparse.step()
            watch.step()
        model.zero_grad()
        nn.init.ones_(model.table.weight)
        model(index).backward()
        spoil(model.first.weight, math.nan, 3)
        with pytest.raises(NonFiniteError, match=r"step 2: the gradient of first\.weight: 3 values"):  # noqa: PT012
            sparse.step()
            dense.step()
            watch.step()


def test_several_optimizers_and_the_first_of_them(device: str) -> None:
    first, second, other = model_on(device), model_on(device), model_on(device)
    both = nn.ModuleDict({"g": first, "d": second})
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, fused=True) for part in (first, second, other)]
    found: list[NonFiniteHit] = []
    with NonFiniteWatch(both, on_hit=found.append) as watch:
        for bad in ("d.0.weight", "g.2.bias", None):
            for part in (first, second, other):
                part.zero_grad()
                part(torch.zeros(2, 3).to(device)).sum().backward()
            spoil(other[0].bias, math.nan)  # of no parameter that is watched
            if bad is not None:
                spoil(dict(both.named_parameters())[bad], 0.0)
                dict(both.named_parameters())[bad].grad.view(-1)[0] = math.nan  # type: ignore[union-attr]
            for optimizer in optimizers:
                optimizer.zero_grad() if bad is None and optimizer is optimizers[2] else optimizer.step()
            watch.step()
            for part in (first, second, other):
                part.load_state_dict(model_on(device).state_dict())
    assert [(hit.step, hit.parameter) for hit in found] == [(1, "d.0.weight"), (2, "g.2.bias")]


def test_a_parameter_of_no_model_has_a_name_too(device: str) -> None:
    model = model_on(device)
    extra = nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [extra]}], lr=0.1)
    extra.grad = torch.full_like(extra, math.nan).detach()
    with NonFiniteWatch(model) as watch, pytest.raises(NonFiniteError, match="SGD: group 1, parameter 0: 2 values"):  # noqa: PT012
        optimizer.step()
        watch.step()


def test_an_optimizer_with_a_closure(device: str) -> None:
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        model(torch.full((2, 3), math.nan).to(device)).sum().backward()
        return 0.0

    with NonFiniteWatch(model) as watch, pytest.raises(NonFiniteError, match=r"step 1: the gradient of 0\.weight"):  # noqa: PT012
        optimizer.step(closure)
        watch.step()
