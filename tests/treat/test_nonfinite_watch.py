"""The watch itself: hooks that go on every way out, waits, what it holds, and wrong use."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nonfinite_loops import model_on
from torch import nn

from perfdoctor.emulate import emulate_cuda
from perfdoctor.errors import NonFiniteError, TreatmentRefused, UsageError
from perfdoctor.treat.nonfinite import NonFiniteWatch
from perfdoctor.treat.nonfinite_hits import NonFiniteHit
from perfdoctor.watch.sync_guard import sync_guard


def test_a_step_that_returns_no_loss_is_told() -> None:
    model = model_on("cpu")
    watch = NonFiniteWatch(model)
    with watch, pytest.raises(UsageError, match="does train_step return it"):
        watch.check(None)
    model(torch.ones(2, 3)).sum().backward()
    watch.check()  # by hand, for the gradients alone
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


def test_a_function_that_fails_is_called_for_the_bad_steps_behind_all_the_same() -> None:
    seen: list[int] = []

    def note(hit: NonFiniteHit) -> None:
        seen.append(hit.step)
        if hit.step == 2:
            raise ConnectionError("the pager is down")

    with emulate_cuda():
        watch = NonFiniteWatch(model_on("cuda"), on_hit=note, max_lag=8)
        watch.check(1.0)
        on_time = watch._ring._copied
        watch._ring._copied = [LateEvent(event) for event in on_time]
        for loss in (math.nan, math.inf, 0.0, math.nan):
            watch.check(torch.full((), loss, device="cuda"))
            watch.step()
        assert seen == []
        watch._ring._copied = on_time  # all four have come at once
        with pytest.raises(ConnectionError):
            watch.step()
        assert seen == [1, 2]
        watch.step()
    assert seen == [1, 2, 4]
    assert [hit.step for hit in watch.hits] == [1, 2, 4]


def test_whole_numbers_of_any_size_are_finite() -> None:
    watch = NonFiniteWatch(model_on("cpu"))
    watch.check(2**2000)
    watch.step()
    assert watch.hits == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: NonFiniteWatch([1]), "model is a list: expected a torch.nn.Module"),
        (lambda model: NonFiniteWatch(nn.ReLU()), "ReLU has no parameters"),
        (lambda model: NonFiniteWatch(model, [model]), "Sequential is no torch.optim.Optimizer"),
        (lambda model: NonFiniteWatch(model, 3), "optimizers: int is none"),
        (lambda model: NonFiniteWatch(model, []), "nothing would be watched"),
        (lambda model: NonFiniteWatch(model, on_hit="stop"), "on_hit='stop': expected 'raise', 'skip' or a function"),
        (lambda model: NonFiniteWatch(model, max_lag=-1), "max_lag=-1"),
        (lambda model: NonFiniteWatch(model, max_lag=1.5), r"max_lag=1\.5"),
        (lambda model: NonFiniteWatch(model, scaler=2), "scaler is a int: expected a torch.amp.GradScaler"),
        (lambda model: NonFiniteWatch(model, kernel="x"), "kernel='x'"),
        (lambda model: NonFiniteWatch(model).check("0.3"), "loss is a str: expected a tensor or a number"),
        (lambda model: NonFiniteWatch(model).check(torch.eye(2).to_sparse()), "loss is torch.sparse_coo: expected a d"),
        (lambda model: NonFiniteWatch(model).check(torch.ones((), device="meta")), "loss is on the meta device"),
        (lambda model: NonFiniteWatch(model).check(torch.nested.nested_tensor([torch.ones(1)])), "loss is nested"),
        (lambda model: copy.deepcopy(NonFiniteWatch(model)), "cannot be copied or pickled"),
        (lambda model: pickle.dumps(NonFiniteWatch(model)), "cannot be copied or pickled"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_wrong_use_is_named(make: Callable[[Any], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(model_on("cpu"))


def test_an_optimizer_at_the_place_of_a_dead_one_has_its_own_parameters() -> None:
    parts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(30))
    seen: list[str | None] = []
    with NonFiniteWatch(parts, on_hit=lambda hit: seen.append(hit.parameter)) as watch:
        for part in parts:  # as many parameters each: nothing but their identity tells them apart
            optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
            part.weight.grad = torch.full((2, 2), math.nan)
            optimizer.step()
            watch.step()
            del optimizer
            gc.collect()
    assert seen == [f"{index}.weight" for index in range(30)]


def test_parameters_exchanged_in_a_group_are_watched() -> None:
    parts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    optimizer = torch.optim.SGD([parts[0].weight, parts[1].weight], lr=0.1)
    seen: list[str | None] = []
    with NonFiniteWatch(parts, on_hit=lambda hit: seen.append(hit.parameter)) as watch:
        for part in parts:
            part.weight.grad = torch.zeros(2, 2)
        optimizer.step()
        watch.step()
        optimizer.param_groups[0]["params"][1] = parts[2].weight
        parts[2].weight.grad = torch.full((2, 2), math.inf)
        optimizer.step()
        watch.step()
    assert seen == ["2.weight"]


def stopped_before_its_step(model: nn.Module) -> None:
    with NonFiniteWatch(model) as watch:
        for loss in (1.0, 2.0, math.nan):
            watch.check(loss)
            if math.isnan(loss):
                break
            watch.step()


def test_a_check_that_no_step_followed_is_not_lost() -> None:
    model = model_on("cpu")
    with pytest.raises(NonFiniteError, match=r"step 3: the loss is not finite\. Training went 0 steps on"):
        stopped_before_its_step(model)
    by_hand = NonFiniteWatch(model, on_hit=lambda _: None)
    by_hand.check(math.inf)
    by_hand.finish()
    by_hand.step()
    by_hand.finish()
    assert [hit.step for hit in by_hand.hits] == [1]


@pytest.mark.parametrize("wide", ["float32", "float16", "float64", "longdouble", "array"])
def test_a_loss_of_numpy_is_a_number(wide: str) -> None:
    numpy = pytest.importorskip("numpy")
    make = numpy.array if wide == "array" else getattr(numpy, wide)
    watch = NonFiniteWatch(model_on("cpu"), on_hit=lambda _: None)
    for value in (1.0, math.nan, -math.inf):
        watch.check(make(value))
        watch.step()
    assert [hit.step for hit in watch.hits] == [2, 3]
    with pytest.raises(UsageError, match=r"loss is a ndarray of shape \(2,\)"):
        watch.check(numpy.ones(2))


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(UsageError, match="on the meta device"):
        NonFiniteWatch(nn.Linear(2, 1, device="meta")).check(1.0)


def test_a_loss_inside_a_function_transform() -> None:
    watch = NonFiniteWatch(model_on("cpu"), on_hit=lambda _: None)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss = (x * math.inf).sum()
        watch.check(loss)
        return loss

    torch.func.grad(loss_of)(torch.ones(2))
    watch.step()
    assert [hit.step for hit in watch.hits] == [1]
    with pytest.raises(UsageError, match=r"inside torch\.vmap"):
        torch.func.vmap(loss_of)(torch.ones(2, 3))


def test_two_watches_do_not_skip_one_update() -> None:
    model = model_on("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(2, 3)).sum().backward()
    first, second = NonFiniteWatch(model, on_hit="skip"), NonFiniteWatch(model, on_hit="skip")
    with pytest.raises(TreatmentRefused, match="another NonFiniteWatch skips updates of this SGD"), first, second:
        optimizer.step()
    assert not hasattr(optimizer, "found_inf")
    for watch in (second, first):  # each alone works, before and after
        with watch:
            optimizer.step()
            watch.step()
        assert not hasattr(optimizer, "found_inf")
