"""graph_obstacles on steps with Python state of every kind: the line and the change, and nothing on a clean step."""

from __future__ import annotations

import argparse
import datetime
import io
import itertools
import os
import queue
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from graph_parts import Parts, found_in, lines_changing
from tqdm import tqdm

from perfdoctor.treat.graph_obstacles import graph_obstacles

HERE = __file__
pytestmark = pytest.mark.usefixtures("emulated")


def on_slots(parts: Parts) -> Callable[..., Any]:
    class State:
        __slots__ = ("count", "later")

        def __init__(self) -> None:
            self.count = 0

    state = State()

    def step(x: torch.Tensor) -> torch.Tensor:
        state.count += 1  # changes
        return parts.trained(x)

    return step


def on_the_function(parts: Parts) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        step.calls = getattr(step, "calls", 0) + 1  # type: ignore[attr-defined]  # changes
        return parts.trained(x)

    return step


def from_a_generator(parts: Parts) -> Callable[..., Any]:
    def halving() -> Iterator[float]:
        factor = 1.0
        while True:
            yield factor
            factor *= 0.5

    factors = halving()

    def step(x: torch.Tensor) -> torch.Tensor:
        factor = next(factors)  # changes
        return parts.trained(x, factor)

    return step


def from_count(parts: Parts) -> Callable[..., Any]:
    numbers = itertools.count()

    def step(x: torch.Tensor) -> torch.Tensor:
        early = next(numbers) < 100  # changes
        return parts.trained(x, 1.0 if early else 0.5)

    return step


def from_cycle(parts: Parts) -> Callable[..., Any]:
    factors = itertools.cycle([1.0, 2.0, 3.0])

    def step(x: torch.Tensor) -> torch.Tensor:
        factor = next(factors)  # changes
        return parts.trained(x, factor)

    return step


def from_a_list(parts: Parts) -> Callable[..., Any]:
    factors = iter([1.0] * 10)

    def step(x: torch.Tensor) -> torch.Tensor:
        for factor in factors:  # changes
            return parts.trained(x, factor)
        return x

    return step


def of_the_day(parts: Parts) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        even = datetime.datetime.now().day % 2  # changes
        return parts.trained(x, 1.0 + even)

    return step


def in_a_counter(parts: Parts) -> Callable[..., Any]:
    seen: Counter[str] = Counter()

    def step(x: torch.Tensor) -> torch.Tensor:
        seen["steps"] += 1  # changes
        return parts.trained(x)

    return step


def from_the_system(parts: Parts) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        factor = os.urandom(1)[0] / 255  # changes
        name = uuid.uuid4().hex  # changes
        return parts.trained(x, factor + 0 * len(name))

    return step


def that_warns(parts: Parts) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < 8:
            warnings.warn("a small batch", stacklevel=1)  # changes
        return parts.trained(x)

    return step


def in_an_array(parts: Parts) -> Callable[..., Any]:
    counts = np.zeros(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        counts[1] += 1  # changes
        return parts.trained(x)

    return step


def in_a_namespace(parts: Parts) -> Callable[..., Any]:
    state, options = SimpleNamespace(step=0), argparse.Namespace(scale=1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        state.step += 1  # changes
        options.scale *= 0.5  # changes
        return parts.trained(x, options.scale)

    return step


def in_a_queue(parts: Parts) -> Callable[..., Any]:
    losses: queue.Queue[Any] = queue.Queue()
    others: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = parts.trained(x)
        losses.put(loss.detach())  # changes
        others.put(1)  # changes
        return loss

    return step


def in_a_hook(parts: Parts) -> Callable[..., Any]:
    calls, gradients = [0], [0]

    def forward_hook(*_: Any) -> None:
        calls[0] += 1  # changes

    def gradient_hook(gradient: torch.Tensor) -> torch.Tensor:
        gradients[0] += 1  # changes
        return gradient * 0.5

    parts.model.register_forward_hook(forward_hook)
    parts.model.weight.register_hook(gradient_hook)

    def step(x: torch.Tensor) -> torch.Tensor:
        return parts.trained(x)

    # the hooks are marked, not the step
    step.marked = in_a_hook  # type: ignore[attr-defined]
    return step


def on_a_progress_bar(parts: Parts) -> Callable[..., Any]:
    bar = tqdm(total=9, file=io.StringIO())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = parts.trained(x)
        bar.update(1)  # changes
        return loss

    return step


def by_a_bound_method(parts: Parts) -> Callable[..., Any]:
    kept: list[torch.Tensor] = []
    keep = kept.append

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = parts.trained(x)
        keep(loss.detach())  # changes
        return loss

    return step


def seeded(parts: Parts) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)  # changes
        return parts.trained(x)

    return step


KINDS = [
    on_slots, on_the_function, from_a_generator, from_count, from_cycle, from_a_list, of_the_day, in_a_counter,
    from_the_system, that_warns, in_an_array, in_a_namespace, in_a_queue, in_a_hook, on_a_progress_bar, seeded,
    by_a_bound_method,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:a small batch")
@pytest.mark.parametrize("make", KINDS)
def test_the_line_that_changes_is_named(make: Callable[..., Any]) -> None:
    parts = Parts()
    step = make(parts)
    marked = lines_changing(getattr(step, "marked", step))
    assert found_in(HERE, graph_obstacles(step, parts.x)) == [("capture-python-state", line) for line in marked]


def test_slots_and_function_attributes_are_put_back() -> None:
    parts = Parts()
    step = on_the_function(parts)
    found_in(HERE, graph_obstacles(step, parts.x))
    assert not hasattr(step, "calls")
    step = on_slots(parts)
    found_in(HERE, graph_obstacles(step, parts.x))
    cells: Any = step.__closure__
    state = next(cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "count"))
    assert state.count == 0
    assert not hasattr(state, "later")
