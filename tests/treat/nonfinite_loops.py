"""What the tests of NonFiniteWatch share: a small model, gradients that are spoilt, and a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from perfdoctor.treat.nonfinite import NonFiniteWatch


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
