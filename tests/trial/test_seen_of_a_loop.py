"""What the running loop shows of itself: autocast around its model, and samples that wait."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from perfdoctor.trial.live_loop import LiveLoop


class Waiting(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, at: int) -> torch.Tensor:
        time.sleep(0.004)
        return torch.ones(3)


@pytest.mark.parametrize("on", [True, False])
def test_autocast_around_the_model_is_seen(live: LiveLoop, on: bool) -> None:
    model = torch.nn.Linear(3, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        loss = model(torch.ones(2, 3)).float().sum()
    loss.backward()
    assert live.loop().autocast is on


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_wait_are_seen(live: LiveLoop, workers: int) -> None:
    assert live.loop().fetch_cpu_share is None
    for batch in DataLoader(Waiting(), batch_size=2, num_workers=workers):
        assert batch.sum() == 6
    share = live.loop().fetch_cpu_share
    assert share is not None
    assert share < 0.5
