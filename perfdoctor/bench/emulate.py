"""How much slower the emulated CUDA device is than plain CPU eager, op by op and for a training step.

    python -m perfdoctor.bench.emulate

Goal: at most 4x where an op takes over 10 us on the CPU, 12x on smaller ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from perfdoctor.emulate import emulate_cuda

_REPEATS = 7


def _ops(device: str) -> dict[str, Callable[[], Any]]:
    small, large = torch.ones(16, device=device), torch.ones(1 << 16, device=device)
    matrix = torch.ones(256, 256, device=device)
    grown = torch.ones(16, device=device, requires_grad=True)
    return {
        "add, 16 elements": lambda: small + small,
        "in-place add, 16 elements": lambda: small.add_(1.0),
        "view, 16 elements": lambda: small.view(4, 4),
        "multiply with autograd, 16 elements": lambda: grown * 2.0,
        "zeros, 16 elements": lambda: torch.zeros(16, device=device),
        "add, 65536 elements": lambda: large + large,
        "softmax, 65536 elements": lambda: large.softmax(0),
        "matmul, 256 x 256": lambda: matrix @ matrix,
    }


def _step(device: str, width: int) -> Callable[[], Any]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(64, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def _seconds(call: Callable[[], Any]) -> float:
    """Median time of one call over a few rounds of 50 ms."""
    call()
    start = time.perf_counter()
    call()
    number = max(1, int(0.05 / max(time.perf_counter() - start, 1e-7)))
    rounds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(number):
            call()
        rounds.append((time.perf_counter() - start) / number)
    return statistics.median(rounds)


def measure() -> list[tuple[str, float, float]]:
    """(name, seconds on the plain CPU, seconds on the emulated device) for each op and step."""
    names = list(_ops("cpu"))
    plain = [_seconds(call) for call in _ops("cpu").values()]
    with emulate_cuda():
        emulated = [_seconds(call) for call in _ops("cuda").values()]
    rows = list(zip(names, plain, emulated, strict=True))
    for width in (32, 512):
        host = _seconds(_step("cpu", width))
        with emulate_cuda():
            device = _seconds(_step("cuda", width))
        rows.append((f"training step, width {width}", host, device))
    return rows


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{'what':40}{'CPU us':>10}{'emulated us':>14}{'ratio':>8}  limit")
    for name, host, device in measure():
        limit = 4 if host > 10e-6 else 12
        print(f"{name:40}{host * 1e6:10.1f}{device * 1e6:14.1f}{device / host:8.1f}  {limit}")


if __name__ == "__main__":
    main()
