"""Non-finite losses and gradients: found on the device, told by parameter and step, skipped where that was asked."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from perfdoctor.emulate import emulate_cuda
from perfdoctor.errors import NonFiniteError, TreatmentRefused, UsageError
from perfdoctor.treat.nonfinite import NonFiniteWatch
from perfdoctor.treat.nonfinite_hits import NonFiniteHit
from perfdoctor.watch.sync_guard import sync_guard


@pytest.fixture(params=["cpu", "emulated"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu":
        yield "cpu"
        return
    with emulate_cuda():
        yield "cuda"


def model_on(device: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)


def sent(x: torch.Tensor, device: str) -> torch.Tensor:
    return x if device == "cpu" else x.pin_memory().to(device, non_blocking=True)


def spoil(parameter: nn.Parameter, value: float, count: int = 1) -> None:
    assert parameter.grad is not None
    parameter.grad.view(-1)[:count].fill_(value)


def train(model: nn.Module, optimizer: Any, device: str, watch: NonFiniteWatch, num_steps: int,
          spoiled: Callable[[int], None] = lambda step: None) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    for step in range(1, num_steps + 1):
        x = sent(torch.randn(8, 3, generator=generator), device)
        loss = model(x).square().mean()
        loss.backward()
        spoiled(step)
        watch.check(loss)
        optimizer.step()
        optimizer.zero_grad()
        watch.step()


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


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_skipped_step_changes_nothing(device: str, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Bitwise: training with a bad step in between ends where training without that step ends."""

    def parameters(bad: bool) -> list[Any]:
        model = model_on(device)
        optimizer = kind(model.parameters(), lr=0.05, fused=True)
        generator = torch.Generator().manual_seed(3)
        with NonFiniteWatch(model, optimizer, on_hit="skip") as watch:
            for step in range(6):
                if step == 3 and not bad:
                    continue
                x = torch.randn(8, 3, generator=generator) if step != 3 else torch.full((8, 3), math.nan)
                model(x.to(device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                watch.step()
        assert not hasattr(optimizer, "found_inf")
        assert [(hit.step, hit.skipped) for hit in watch.hits] == ([(4, True)] if bad else [])
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [value.detach().cpu() for value in (*model.parameters(), *states) if value is not None]

    with caplog.at_level(logging.WARNING, "perfdoctor"):
        for skipped, clean in zip(parameters(True), parameters(False), strict=True):
            assert torch.equal(skipped, clean)
    assert "step 4: the gradient of 0.weight" in caplog.text
    assert "skipped" in caplog.text


def test_a_bad_loss_skips_the_update_too(device: str) -> None:
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with NonFiniteWatch(model, on_hit="skip") as watch:
        model(torch.ones(2, 3).to(device)).sum().backward()
        watch.check(torch.full((), math.nan, device=device))
        optimizer.step()
        watch.step()
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        optimizer.step()
        watch.step()
        assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_what_cannot_skip_is_refused(device: str) -> None:
    model = model_on(device)
    plain = torch.optim.Adam(model.parameters())
    with pytest.raises(TreatmentRefused, match=r"Adam cannot skip an update on the device\. Make it with fused=True"):
        NonFiniteWatch(model, plain, on_hit="skip")
    model(torch.ones(2, 3).to(device)).sum().backward()
    with NonFiniteWatch(model, on_hit="skip"), pytest.raises(TreatmentRefused, match="fused=True"):
        plain.step()
    fused = torch.optim.Adam(model.parameters(), fused=True)
    with NonFiniteWatch(model, on_hit="skip"), pytest.raises(TreatmentRefused, match="closure"):
        fused.step(lambda: 0.0)
    with pytest.raises(UsageError, match="put the loop inside `with watch:`"):
        NonFiniteWatch(model, fused, on_hit="skip").check(torch.ones(()))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_are_no_alarm(device: str, fused: bool) -> None:
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16, growth_interval=100)
    with NonFiniteWatch(model, scaler=scaler) as watch:
        for step in range(1, 6):
            loss = model(torch.ones(4, 3).to(device)).square().mean()
            scaler.scale(loss).backward()
            if step in (2, 3):
                spoil(model[0].weight, math.inf)
            watch.check(loss)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.step()
        assert scaler.get_scale() == 2.0**14  # it has skipped two
        assert watch.hits == ()
        # What goes bad after the scaler has looked is a real update with it.
        loss = model(torch.ones(4, 3).to(device)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        spoil(model[2].weight, math.nan)
        scaler.step(optimizer)
        scaler.update()
        with pytest.raises(NonFiniteError, match=r"step 6: the gradient of 2\.weight"):
            watch.step()


def test_a_scaler_by_hand(device: str) -> None:
    model = model_on(device)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    watch = NonFiniteWatch(model, scaler=scaler)
    for scale in (4.0, 1.0, 0.5):
        scaler.update(scale) if scale != 4.0 else None
        scaler.scale(model(torch.ones(2, 3).to(device)).sum()).backward()
        spoil(model[0].weight, math.inf)
        watch.check(torch.ones((), device=device))
        if scale >= 1:
            watch.step()
    with pytest.raises(NonFiniteError, match="step 3"):  # the scale has collapsed: skipping does not help any more
        watch.step()
    watch.check(torch.full((), math.inf, device=device))
    with pytest.raises(NonFiniteError, match="step 4: the loss"):
        watch.step()
    assert NonFiniteWatch(model, scaler=torch.amp.GradScaler(device, enabled=False))._scaler is None


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


def test_the_hooks_go_on_every_way_out() -> None:
    from torch.optim import optimizer as module

    def installed() -> int:
        return len(module._global_optimizer_pre_hooks) + len(module._global_optimizer_post_hooks)

    model = model_on("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    before = installed()
    watch = NonFiniteWatch(model, on_hit="skip")
    for error in (None, ValueError, KeyboardInterrupt):
        try:
            with watch:
                assert installed() == before + 2
                with pytest.raises(UsageError, match="entered already"), watch:
                    pass
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                if error is not None:
                    optimizer.found_inf = torch.ones(())  # a scaler's, left as an exception leaves it
                    raise error
        except (ValueError, KeyboardInterrupt):
            pass
        assert installed() == before
        assert hasattr(optimizer, "found_inf") is (error is not None)


def test_an_update_that_fails_leaves_no_skip_behind() -> None:
    model = model_on("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), NonFiniteWatch(model, on_hit="skip"):
        optimizer.step()
    assert not hasattr(optimizer, "found_inf")


class LateEvent:
    """An event of a device that is far behind: never there when asked, there once waited for."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)

    def query(self) -> bool:
        return False


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_it_waits_at_max_lag_and_no_sooner(max_lag: int) -> None:
    with emulate_cuda():
        model = model_on("cuda")
        watch = NonFiniteWatch(model, max_lag=max_lag)
        watch.check(torch.full((), math.nan, device="cuda"))
        watch._ring._copied = [LateEvent(event) for event in watch._ring._copied]
        with sync_guard(budget=0) as guard:
            for _ in range(max_lag):
                watch.step()
                watch.check(torch.zeros((), device="cuda"))
            assert watch.num_waits == 0
            with pytest.raises(NonFiniteError, match=f"step 1: .* went {max_lag} steps? on"):
                watch.step()
            assert watch.num_waits == 1
            assert len(guard.allowed) == 1
        assert watch.hits[0].num_steps_later == max_lag


def test_leaving_the_block_looks_at_the_last_steps() -> None:
    with emulate_cuda():
        model = model_on("cuda")
        watch = NonFiniteWatch(model, max_lag=5)
        watch.check(1.0)
        watch._ring._copied = [LateEvent(event) for event in watch._ring._copied]
        with pytest.raises(NonFiniteError, match="step 1"), sync_guard(budget=0), watch:  # noqa: PT012
            watch.check(torch.full((), math.nan, device="cuda"))
            watch.step()
            watch.step()
        assert watch.num_waits == 0


@settings(max_examples=30, deadline=None)
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


def test_checks_without_steps_are_told() -> None:
    watch = NonFiniteWatch(model_on("cpu"))
    with pytest.raises(UsageError, match=r"10000 checks without a step\(\)"):  # noqa: PT012
        for _ in range(10_001):
            watch._checks.append(())
        watch.check(1.0)
    watch.step()
    watch.check(1.0)


def test_the_watch_holds_no_step_back() -> None:
    model = model_on("cpu")
    watch = NonFiniteWatch(model)
    for _ in range(50):
        model(torch.ones(2, 3)).sum().backward()
        watch.check(model(torch.ones(2, 3)).sum())
        watch.step()
    assert watch._ring.num_in_flight == 0
    assert not watch._checks
    gc.collect()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: NonFiniteWatch([1]), "model is a list: expected a torch.nn.Module"),
        (lambda model: NonFiniteWatch(nn.ReLU()), "ReLU has no parameters"),
        (lambda model: NonFiniteWatch(model, [model]), "Sequential is no torch.optim.Optimizer"),
        (lambda model: NonFiniteWatch(model, 3), "optimizers: int is none"),
        (lambda model: NonFiniteWatch(model, on_hit="stop"), "on_hit='stop': expected 'raise', 'skip' or a function"),
        (lambda model: NonFiniteWatch(model, max_lag=-1), "max_lag=-1"),
        (lambda model: NonFiniteWatch(model, max_lag=1.5), r"max_lag=1\.5"),
        (lambda model: NonFiniteWatch(model, scaler=2), "scaler is a int: expected a torch.amp.GradScaler"),
        (lambda model: NonFiniteWatch(model, kernel="x"), "kernel='x'"),
        (lambda model: NonFiniteWatch(model).check("0.3"), "loss is a str: expected a tensor or a number"),
    ],
)
def test_wrong_use_is_named(make: Callable[[Any], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(model_on("cpu"))
