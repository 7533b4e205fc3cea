"""Whatever ends a trial, and whenever: nothing of it outlives it."""

import gc
import sys
import threading
from functools import partial
from typing import Any

import pytest
import suspect_trials
import torch
from suspect_trials import trial_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, dataloader

import perfdoctor
from perfdoctor.diagnose.finding import Finding
from perfdoctor.trial.runner import OBSERVED_STEPS, Trial

METHODS = ("item", "to", "cpu", "norm", "pow", "sum", "mul_", "add_", "__getitem__", "__bool__", "__format__", "copy_")


finding = partial(suspect_trials.finding, __file__)


class Loop:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 2)).to("cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.batches: Any = iter(DataLoader(TensorDataset(torch.randn(4000, 4)), batch_size=2))

    def step(self) -> None:
        (x,) = next(self.batches)
        x = x.to("cuda")  # copied
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        sum(p.grad.norm().item() ** 2 for p in self.model.parameters() if p.grad is not None)  # norms
        self.optimizer.step()
        with torch.no_grad():
            for mine, p in zip(self.average, self.model.parameters(), strict=True):
                mine.mul_(0.9).add_(p.detach(), alpha=0.1)  # average
        loss.item()  # read
        torch.cuda.synchronize()  # waited


def findings() -> list[Finding]:
    return [
        finding("copied", "pageable-copy", "h2d_pageable"),
        finding("norms", "gradient-loop", "slow_grad_norm_loop"),
        finding("average", "gradient-loop", "launch_bound"),
        finding("read", "host-sync", "item"),
        finding("waited", "host-sync", "cuda_synchronize"),
        finding("", "garbage-collection", "python_gc"),
        finding("", "data-wait", "data_wait"),
        finding("", "launch-bound", "launch_bound"),
        finding("", "gradient-loop", "launch_bound", title="a single-tensor optimizer step"),
    ]


def global_state() -> list[Any]:
    clip = nn.utils.clip_grad_norm_
    return [
        *(vars(torch.Tensor).get(name) for name in METHODS),
        *(getattr(torch, name) for name in ("norm", "tensor", "where", "equal", "_foreach_norm")),
        torch.cuda.synchronize, getattr(torch._C, "_cuda_synchronize", None), torch.cuda.Event.synchronize,
        torch.linalg.norm,
        torch.nn.functional.one_hot, nn.utils.clip_grad._get_total_norm, DataLoader.__iter__,
        dataloader._BaseDataLoaderIter.__next__, gc.collect, gc.isenabled(), torch.is_anomaly_enabled(),
        *(cell.cell_contents for cell in clip.__closure__ or ()),  # type: ignore[attr-defined]
    ]  # fmt: skip


def same(before: list[Any], after: list[Any]) -> bool:
    return all(a is b for a, b in zip(before, after, strict=True))


# While observed, at the plan, in the first base block, in the first and the last arms, in between.
MOMENTS = [0, 3, OBSERVED_STEPS, OBSERVED_STEPS + 4, OBSERVED_STEPS + 13, *range(30, 260, 23)]


def run_until(moment: int, loop: Loop, trial: Trial, error: type[BaseException]) -> None:
    try:
        for number in range(moment + 1):
            loop.step()
            if number == moment:
                raise error
            trial.step_ended(number)
    finally:
        trial.finish()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_error_in_the_loop_at_any_moment(device: Any, error: type[BaseException]) -> None:
    loop = Loop()
    before = global_state()
    for moment in MOMENTS:
        trial = trial_of(findings(), loop.optimizer, steps=4000)
        trial.start()
        with pytest.raises(error):
            run_until(moment, loop, trial, error)
        assert same(before, global_state()), moment
        group = loop.optimizer.param_groups[0]
        assert (group["fused"], group["foreach"]) == (None, False)
        assert not any(state["step"].is_cuda for state in loop.optimizer.state.values())


def test_one_that_cannot_be_put_back_does_not_keep_the_others(device: Any) -> None:
    loop = Loop()
    before = global_state()
    trial = trial_of(findings(), loop.optimizer, steps=4000)
    trial.start()
    trial._neutralisers[3].remove = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        trial.finish()
    assert same(before, global_state())


def test_a_patch_that_the_loop_makes_meanwhile_is_called_and_stays(device: Any) -> None:
    loop = Loop()
    item = torch.Tensor.item
    calls = []
    trial = trial_of(findings(), loop.optimizer, steps=4000)
    trial.start()
    under = torch.Tensor.item

    def patched(self: torch.Tensor) -> Any:
        calls.append(1)
        return under(self)

    try:
        torch.Tensor.item = patched  # type: ignore[method-assign, assignment]
        for number in range(OBSERVED_STEPS + 6):
            loop.step()
            trial.step_ended(number)
        trial.finish()
        assert len(calls) == (6 + 1 + 6) * (OBSERVED_STEPS + 6)  # norms, loss, AdamW's counters: none goes round it
        assert torch.Tensor.item is patched
        assert isinstance(torch.ones(()).item(), float)
    finally:
        torch.Tensor.item = item  # type: ignore[method-assign]


def test_other_threads_read_their_own_values(device: Any) -> None:
    loop = Loop()
    trial = trial_of(findings(), loop.optimizer, steps=4000)
    wrong: list[float] = []
    over = threading.Event()

    def read() -> None:
        value = 0.0
        while not over.is_set():
            value += 1.0
            if torch.tensor(value).item() != value:
                wrong.append(value)

    thread = threading.Thread(target=read)
    trial.start()
    thread.start()
    try:
        for number in range(60):
            loop.step()
            trial.step_ended(number)
    finally:
        over.set()
        thread.join()
        trial.finish()
    assert not wrong


def test_a_loader_in_the_middle_of_its_epoch_goes_on(device: Any) -> None:
    loop = Loop()
    trial = trial_of(findings(), loop.optimizer, steps=4000)
    trial.start()
    for number in range(20):
        loop.step()
        trial.step_ended(number)
    trial.finish()
    rest = sum(1 for _ in loop.batches)
    assert rest == 2000 - 20 or 1900 < rest < 2000  # fetched and thrown away, none begun again


def test_a_second_trial_in_the_same_process(device: Any) -> None:
    before = global_state()
    for _ in range(2):
        loop = Loop()
        trial = trial_of(findings(), loop.optimizer, steps=4000)
        trial.start()
        for number in range(8 + 40):
            loop.step()
            trial.step_ended(number)
        trial.finish()
        trial.finish()
    assert same(before, global_state())


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, SystemExit])
def test_a_session_puts_state_back_bit_for_bit(error: type[BaseException] | None) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    kept: list[Any] = []
    before = global_state()

    def state() -> list[torch.Tensor]:
        held = [tensor for row in optimizer.state.values() for tensor in row.values()]
        return [t.detach().clone() for t in (*model.state_dict().values(), *held, torch.get_rng_state())]

    steps = 0
    try:
        with perfdoctor.watch(warmup=2, active=3) as session:
            trial = session.trial(steps=80, model=model)
            while not trial.over:
                if trial.running and not kept:
                    kept.append(state())
                model(torch.randn(8, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += bool(kept)
                if error is not None and steps == 30:
                    raise error
    except BaseException as caught:
        if error is None or not isinstance(caught, error):
            raise
    after = state()
    assert len(after) == len(kept[0])
    assert all(torch.equal(a, b) for a, b in zip(kept[0], after, strict=True))
    assert same(before, global_state())
    assert sys.exc_info() == (None, None, None)
