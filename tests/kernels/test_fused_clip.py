"""Clipping inside a fused optimizer ends where clipping before it does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from perfdoctor.errors import UsageError
from perfdoctor.kernels.fused_clip import clip_in_optimizer


def trained(clips_in_optimizer: bool, max_norm: float) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    for step in range(3):
        optimizer.zero_grad()
        (model(torch.randn(4, 8)) * 10**step).square().sum().backward()
        if clips_in_optimizer:
            clip_in_optimizer(optimizer, max_norm)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        assert getattr(optimizer, "grad_scale", None) is None  # holds for one step
    return [value for parameter in model.parameters() for value in parameter.detach().reshape(-1).tolist()]


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_same_training_as_clipping_before_the_step(max_norm: float) -> None:
    assert trained(True, max_norm) == pytest.approx(trained(False, max_norm), rel=1e-5, abs=1e-7)


def test_refuses_what_would_not_clip() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="fused=True"):
        clip_in_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    clip_in_optimizer(optimizer, 1.0)
    with pytest.raises(UsageError, match="grad_scale already"):
        clip_in_optimizer(optimizer, 1.0)
