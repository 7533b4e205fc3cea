"""How the time of training an MLP grows with its layers, steps, batch and width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perfdoctor.bench.memory import fitting
from perfdoctor.bench.result import BenchResult, BenchRow, Fact
from perfdoctor.bench.timing import wall_time

Sizes = dict[str, int]

REFERENCE: Sizes = {"layers": 4, "steps": 4, "batch": 256, "width": 1024}
AXES: Mapping[str, Sequence[int]] = {
    "layers": (1, 2, 4, 8, 16),
    "steps": (1, 2, 4, 8, 16),
    "batch": (16, 64, 256, 1024, 4096, 16384),
    "width": (64, 256, 1024, 4096, 8192),
}
SMALL_REFERENCE: Sizes = {"layers": 2, "steps": 2, "batch": 32, "width": 64}
SMALL_AXES: Mapping[str, Sequence[int]] = {
    "layers": (1, 2, 4),
    "steps": (1, 2, 4),
    "batch": (16, 64, 256),
    "width": (32, 128, 512),
}


def num_flops(layers: int, steps: int, batch: int, width: int) -> int:
    """Of the matrix products: one forward and two backward a layer, but the first layer's input needs no gradient."""
    return steps * (3 * layers - 1) * 2 * batch * width**2


def needed_bytes(layers: int, steps: int, batch: int, width: int) -> int:
    """At most, float32: weights and gradients, and three activations a layer (one kept before and one after the ReLU,
    and one gradient)."""
    return 4 * (2 * layers * width * (width + 1) + 3 * (layers + 1) * batch * width)


def run_mlp(device: str, *, small: bool) -> BenchResult:
    """Time training steps (forward, backward, SGD) along each axis, the other sizes as in the reference.

    Raises:
        UsageError: an axis of which no size fits the free memory.
    """
    reference, axes = (SMALL_REFERENCE, SMALL_AXES) if small else (REFERENCE, AXES)
    rows: list[BenchRow] = []
    facts: dict[str, Fact] = {}
    notes = [f"the sizes that an axis leaves alone: {', '.join(f'{n} {size}' for n, size in reference.items())}"]
    for axis, sizes in axes.items():
        kept, left_out = fitting(f"mlp {axis}", sizes, _needed(reference, axis), device)
        found = [_row(axis, reference | {axis: size}, device) for size in kept]
        facts[f"exponent_at_end_{axis}"] = last_exponent(kept, [row.measurement.median_ns for row in found])
        rows += found
        notes += [*left_out, _growth_note(axis, facts[f"exponent_at_end_{axis}"])]
    return BenchResult(
        verb="mlp", about="training steps of an MLP, float32", rows=tuple(rows), facts=facts, notes=tuple(notes)
    )


def last_exponent(sizes: Sequence[int], times: Sequence[float]) -> float | None:
    """How the time grows between the two largest sizes: 1 is in proportion, 0 not at all; None for one size."""
    if len(sizes) < 2:
        return None
    return round(math.log(times[-1] / times[-2]) / math.log(sizes[-1] / sizes[-2]), 3)


def _needed(reference: Sizes, axis: str) -> Callable[[int], int]:
    return lambda size: needed_bytes(**(reference | {axis: size}))


def _growth_note(axis: str, exponent: Any) -> str:
    if exponent is None:
        return f"{axis}: one size only, so no growth"
    return f"{axis}: at the end the time grows as {axis}^{exponent:.2f}"


def _row(axis: str, sizes: Sizes, device: str) -> BenchRow:
    measurement = wall_time(
        f"mlp, {axis} {sizes[axis]}", _training(device=device, **sizes), num_flops=num_flops(**sizes), repeats=10
    )
    return BenchRow(measurement=measurement, sizes=dict(sizes), dtype="float32")


def _training(layers: int, steps: int, batch: int, width: int, device: str) -> Callable[[], object]:
    import torch
    from torch import nn

    parts = [part for _ in range(layers) for part in (nn.Linear(width, width, device=device), nn.ReLU())]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(batch, width, device=device)

    def train() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    return train
