"""Loaders whose rows know their number, and what the tests do with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from perfdoctor.trial.live_loop import LiveLoop


class Numbers(Dataset[torch.Tensor]):
    """Rows that know their number; each takes `pause_s`."""

    def __init__(self, first: int = 0, pause_s: float = 0.0, size: int = 400) -> None:
        self.first, self.pause_s, self.size = first, pause_s, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.pause_s)
        return torch.full((2,), float(self.first + index))


def number_loader(first: int = 0, pause_s: float = 0.0, **settings: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(first, pause_s), batch_size=2, **settings)


def first_of(batch: torch.Tensor) -> int:
    return int(batch[0, 0])


def hold(live: LiveLoop) -> None:
    live.held = True
    live.restart(replayed=True)


def cycled(make: Callable[[], Any]) -> Iterator[int]:
    """A loop that makes a loader for each epoch and leaves it after three steps."""
    weight = torch.ones(2, requires_grad=True)
    while True:
        for number, x in enumerate(make()):
            (x * weight).sum().backward()
            yield first_of(x)
            if number == 2:
                break
