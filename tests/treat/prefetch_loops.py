"""What the tests of DevicePrefetcher share: batches of one number each, and how to read them."""

from __future__ import annotations

import threading
from typing import Any

import torch

BIG = 100_000  # floats: enough for the threads to do the staging
Batch = dict[str, Any]


def batches(count: int, size: int = 8) -> list[Batch]:
    return [{"x": torch.full((size,), float(i)), "n": i} for i in range(count)]


def value(tensor: torch.Tensor) -> float:
    host = tensor.cpu()
    assert bool((host == host.flatten()[0]).all())
    return float(host.flatten()[0])


def staging_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "perfdoctor-staging"]
