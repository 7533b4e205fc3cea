"""`session.trial()` broken off anywhere leaves the loop as one without a trial that was stopped after the same step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

import perfdoctor
from perfdoctor.trial.runner import Trial

PLACES = ("before the batch", "after the batch", "after backward", "after the update", "at the end", "never")


class Ended(Exception):
    pass


class Loop:
    """Whatever a step may do behind its update: a schedule, a clamp by `.data`, gradients dropped, a draw, a rate."""

    def __init__(self, source: str, schedule: str) -> None:
        torch.manual_seed(4)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        kinds: dict[str, Any] = {
            "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50),
            "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10_000),
            "by hand": lambda o: None,
        }
        self.schedule = kinds[schedule](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        self.source = source
        self.done = 0  # steps that came to their end

    def batches(self, session: Any) -> Iterator[torch.Tensor]:
        if self.source == "drawn":
            while True:
                yield torch.randn(8, 6)
        pool = [torch.full((8, 6), float(i)) for i in range(7)]
        loader: Any = pool if self.source == "session" else torch.utils.data.DataLoader(pool, batch_size=None)
        while True:
            yield from session.batches(loader) if session is not None and self.source == "session" else loader

    def step(self, batches: Iterator[torch.Tensor], ends_at: str = "") -> None:
        def at(place: str) -> None:
            if place == ends_at:
                raise Ended

        at("before the batch")
        x = next(batches)
        at("after the batch")
        self.scaler.scale(self.model(x).square().mean()).backward()
        at("after backward")
        self.scaler.step(self.optimizer)
        at("after the update")
        self.scaler.update()
        if self.schedule is None:
            self.optimizer.param_groups[0]["lr"] *= 0.99
        else:
            self.schedule.step()
        for p in self.model.parameters():
            p.data.clamp_(-0.3, 0.3)
        self.optimizer.zero_grad()
        self.done += 1
        at("at the end")

    def state(self) -> list[Any]:
        held = [tensor for row in self.optimizer.state.values() for tensor in row.values()]
        tensors = [t.detach().clone() for t in (*self.model.state_dict().values(), *held)]
        group = {name: value for name, value in self.optimizer.param_groups[0].items() if name != "params"}
        schedule = None if self.schedule is None else self.schedule.state_dict()
        gradients = [p.grad is None for p in self.model.parameters()]
        return [tensors, group, schedule, self.scaler.state_dict(), gradients, torch.get_rng_state()]


def assert_same(one: list[Any], other: list[Any], *, draws: bool) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    assert one[1:4] == other[1:4]
    if draws:
        assert one[4] == other[4]
        assert torch.equal(one[5], other[5])


def broken_off(loop: Loop, place: str, after: int) -> int:
    """Steps of the loop when its trial began; it is broken off so many steps later. 0: the trial did not begin."""
    began = 0
    with perfdoctor.watch(warmup=2, active=3) as session:
        trial = session.trial(steps=60, model=loop.model)
        batches = loop.batches(session)
        try:
            while not trial.over:
                if trial.running and not began:
                    began = loop.done
                loop.step(batches, place if began and loop.done >= began + after else "")
        except Ended:
            pass
    return began


@pytest.mark.parametrize("source", ["session", "loader", "drawn"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("after", [1, 20])
def test_it_is_as_without_a_trial(source: str, place: str, after: int) -> None:
    loop = Loop(source, "cosine")
    hooks = (dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks))
    began = broken_off(loop, place, after)
    assert (dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)) == hooks
    alone = Loop(source, "cosine")
    batches = alone.batches(None)
    for _ in range(began):
        alone.step(batches)
    # Where the loop draws its batches itself, nothing tells where a step begins: gradients and draws of one are left.
    assert_same(alone.state(), loop.state(), draws=source != "drawn")


@pytest.mark.parametrize("schedule", ["one cycle", "by hand"])
def test_other_schedules(schedule: str) -> None:
    loop = Loop("session", schedule)
    began = broken_off(loop, "after backward", 5)
    alone = Loop("session", schedule)
    batches = alone.batches(None)
    for _ in range(began):
        alone.step(batches)
    assert_same(alone.state(), loop.state(), draws=True)


def test_in_the_very_step_in_which_it_began_nothing_is_touched() -> None:
    """The update is made, the schedule has not stepped: the loop's own affair, as without a trial."""
    loop = Loop("session", "cosine")
    seen: list[Any] = []
    step, trial = loop.scaler.update, None

    def update() -> None:
        if trial is not None and trial.running and not seen:
            seen.append(loop.state())
            raise Ended
        step()

    loop.scaler.update = update  # type: ignore[method-assign, assignment]
    with perfdoctor.watch(warmup=2, active=3) as session:
        trial = session.trial(steps=60, model=loop.model)
        batches = loop.batches(session)
        try:
            while True:
                loop.step(batches)
        except Ended:
            pass
    assert_same(seen[0], loop.state(), draws=True)


def test_a_hook_before_the_update_that_came_after_ours() -> None:
    """torch iterates over those hooks while ours is called: it must not take itself away."""
    loop, calls = Loop("drawn", "cosine"), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    handle: Any = None
    with perfdoctor.watch(warmup=2, active=3) as session:
        trial = session.trial(steps=60, model=loop.model)
        batches = loop.batches(session)
        while not trial.over:
            if trial.running and handle is None:
                handle = register_optimizer_step_pre_hook(count)
            loop.step(batches)
    handle.remove()
    assert calls
    assert not _global_optimizer_pre_hooks


def test_ctrl_c_while_the_trial_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: Trial) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trial, "start", start)
    loop, hooks = Loop("session", "cosine"), dict(_global_optimizer_pre_hooks)
    with pytest.raises(KeyboardInterrupt):
        broken_off(loop, "never", 1)
    assert dict(_global_optimizer_pre_hooks) == hooks
