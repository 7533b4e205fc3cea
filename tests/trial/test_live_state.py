"""`session.trial()` with no model named: what follows the optimizers is found among the living objects and put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import perfdoctor

MODELS = {
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)),
    "no affine": lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 1)),
    "frozen part": lambda: nn.Sequential(nn.Linear(6, 5).requires_grad_(False), nn.BatchNorm1d(5), nn.Linear(5, 1)),
}
SCHEDULES = {
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.999),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10_000),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_buffers_and_schedules_are_put_back(kind: str, schedule: str) -> None:
    torch.manual_seed(1)
    models = [MODELS[kind](), MODELS[kind]()]  # two with an optimizer each
    optimizers = [torch.optim.Adam([p for p in m.parameters() if p.requires_grad], 1e-3) for m in models]
    schedules = [SCHEDULES[schedule](each) for each in optimizers]
    kept: list[Any] = []

    def state() -> tuple[list[torch.Tensor], list[Any]]:
        tensors = [t.detach().clone() for m in models for t in m.state_dict().values()]
        return tensors, [(each.last_epoch, each.get_last_lr(), each._step_count) for each in schedules]

    with perfdoctor.watch(warmup=2, active=3) as session:
        trial = session.trial(steps=60)
        for number in range(400):
            if trial.running and not kept:
                kept.append(state())
            if trial.over:
                break
            at = number % 2
            models[at](torch.randn(8, 6)).square().mean().backward()
            optimizers[at].step()
            schedules[at].step()
            optimizers[at].zero_grad()
    tensors, rates = state()
    assert all(torch.equal(a, b) for a, b in zip(kept[0][0], tensors, strict=True))
    assert rates == kept[0][1]
