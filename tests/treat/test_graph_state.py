"""graph_obstacles on steps with Python state of every kind: the line and the change, and nothing on a clean step."""

from __future__ import annotations

import argparse
import datetime
import inspect
import io
import itertools
import os
import queue
import threading
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from tqdm import tqdm

import perfdoctor
from perfdoctor.treat.graph_obstacles import graph_obstacles
from perfdoctor.treat.iterator_position import position

HERE = __file__


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with perfdoctor.emulate_cuda():
        yield


class Parts:
    """A model, its optimizer and a batch."""

    def __init__(self, lr: float = 1e-3) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, capturable=True)
        self.x = torch.ones(6, 4, device="cuda")

    def trained(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(x).square().mean() * factor
        loss.backward()
        self.optimizer.step()
        return loss


def rows(step: Callable[..., Any], batch: torch.Tensor) -> list[tuple[str, int]]:
    result = graph_obstacles(step, batch)
    return [(row.code, row.site.frame.line) for row in result if row.site.frame.file == HERE]


def lines_marked(function: Callable[..., Any]) -> list[int]:
    lines, first = inspect.getsourcelines(function)
    return [first + number for number, line in enumerate(lines) if line.rstrip().endswith("# changes")]


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
    marked = lines_marked(getattr(step, "marked", step))
    assert rows(step, parts.x) == [("capture-python-state", line) for line in marked]


def test_hooks_fire_on_a_model_that_was_moved_and_back() -> None:
    model, gradients = nn.Linear(4, 2), []
    model.weight.register_hook(gradients.append)
    model.bias.register_post_accumulate_grad_hook(gradients.append)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    graph_obstacles(step, torch.ones(3, 4))
    assert gradients == []
    step(torch.ones(3, 4))
    assert len(gradients) == 2


def test_what_was_put_into_arrays_and_queues_is_taken_back() -> None:
    parts, counts = Parts(), np.arange(3.0)
    losses: queue.Queue[Any] = queue.Queue()

    def step(x: torch.Tensor) -> torch.Tensor:
        counts[:] = counts * 2
        losses.put(x)
        return parts.trained(x)

    assert len(rows(step, parts.x)) == 2
    assert counts.tolist() == [0, 1, 2]
    assert (losses.qsize(), losses.unfinished_tasks) == (0, 0)


def test_a_thread_of_the_users_that_works_on_the_device() -> None:
    parts, ended = Parts(), threading.Event()

    def feed() -> None:
        while not ended.wait(0.01):
            torch.ones(2).to("cpu")

    def wait() -> None:
        ended.wait()

    feeder = threading.Thread(target=feed, name="feeder")
    waiter = threading.Thread(target=wait)
    feeder.start()
    waiter.start()
    try:
        (row,) = graph_obstacles(parts.trained, parts.x)
    finally:
        ended.set()
        feeder.join()
        waiter.join()
    assert (row.code, row.severity) == ("capture-other-thread", "handled")
    assert row.site.text.startswith("feeder = ")


def test_an_optimizer_that_no_line_names_is_told_by_its_step() -> None:
    parts = Parts()
    optimizer = [torch.optim.LBFGS, torch.optim.Adam][1](parts.model.parameters())

    def step(x: torch.Tensor) -> None:
        parts.model(x).sum().backward()
        optimizer.step()  # stepped

    (row,) = [row for row in graph_obstacles(step, parts.x) if row.code == "capture-optimizer"]
    assert row.site.text.endswith("# stepped")


def test_slots_and_function_attributes_are_put_back() -> None:
    parts = Parts()
    step = on_the_function(parts)
    rows(step, parts.x)
    assert not hasattr(step, "calls")
    step = on_slots(parts)
    rows(step, parts.x)
    cells: Any = step.__closure__
    state = next(cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "count"))
    assert state.count == 0
    assert not hasattr(state, "later")


def test_a_file_that_is_written(tmp_path: Path) -> None:
    parts = Parts()
    with (tmp_path / "losses").open("w") as log:

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = parts.trained(x)
            log.write("one more\n")  # changes
            (tmp_path / "last").write_text("one")  # changes
            with open(tmp_path / "again", "w"):  # changes
                pass
            return loss

        assert rows(step, parts.x) == [("capture-python-state", line) for line in lines_marked(step)]


def test_iterators_of_the_step_itself_are_clean() -> None:
    parts = Parts()
    names = ["a", "b"]

    def step(x: torch.Tensor) -> torch.Tensor:
        first = next(iter(parts.model.parameters()))
        factors = [1.0 for _ in zip(names, itertools.count(), strict=False)]
        return parts.trained(x, factors[0]) + 0 * first.sum()

    assert rows(step, parts.x) == []


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_weights_that_torch_derives_before_each_forward_are_clean() -> None:
    parts = Parts()
    for derive in (nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
        model = derive(nn.Linear(4, 2).cuda())
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True)

        def step(x: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        assert rows(step, parts.x) == []


def test_the_position_of_an_iterator_costs_no_draw() -> None:
    numbers = [iter(range(9)), iter([1, 2, 3]), itertools.cycle([1, 2]), itertools.count(3), enumerate("ab"),
               itertools.islice(itertools.count(), 5), iter({1: 2}.items()), (n for n in (1, 2))]  # fmt: skip
    for each in numbers:
        here = position(each)
        assert here is not None
        assert position(each) == here
        next(each)
        assert position(each) not in (None, here)
    done = iter([1])
    list(done)
    assert position(done) == position(done)


def set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate  # set here


def never_called(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0


def test_rates_that_the_loop_writes_and_no_others() -> None:
    parts, other = Parts(), Parts()
    optimizer, foreign = parts.optimizer, other.optimizer
    settings: dict[str, float] = {}

    def step(x: torch.Tensor) -> torch.Tensor:
        return parts.trained(x)

    def loop() -> list[tuple[str, int]]:
        found = rows(step, parts.x)
        settings["lr"] = 0.1
        foreign.param_groups[0]["lr"] = 0.2
        set_rate(optimizer, 0.3)
        optimizer.param_groups[0]["lr"] = 0.4  # and here
        return found

    marked = [number for number, line in enumerate(Path(HERE).read_text().splitlines(), 1)
              if line.endswith(("# set here", "# and here"))]  # fmt: skip
    assert loop() == [("capture-baked-value", line) for line in marked]


def test_copies_in_the_step_are_told_how_a_graph_wants_them() -> None:
    parts = Parts()

    def step(x: torch.Tensor) -> torch.Tensor:
        return parts.trained(x * torch.arange(4.0).to("cuda"))

    (row,) = graph_obstacles(step, parts.x)
    assert row.code == "capture-host-tensor"
    assert "once, before the step" in row.change
    assert "non_blocking" not in row.change


def test_threads_that_the_step_starts() -> None:
    parts = Parts()
    with ThreadPoolExecutor(1) as pool:

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = parts.trained(x)
            thread = threading.Thread(target=time.sleep, args=(0,))
            thread.start()  # changes
            pool.submit(abs, 1).result()  # changes
            thread.join()
            return loss

        assert rows(step, parts.x) == [("capture-other-thread", line) for line in lines_marked(step)]


def test_the_item_of_a_container_that_changes_is_shown() -> None:
    parts = Parts()
    counts, names = {"seen": 1, "kept": 5}, ["a", "b"]

    def step(x: torch.Tensor) -> torch.Tensor:
        counts["seen"] += 1
        names[1] = f"{counts['seen']}"
        return parts.trained(x)

    text = str(graph_obstacles(step, parts.x))
    assert "changes counts in Python (['seen'] 3 -> 4)" in text
    assert "changes names in Python ([1] '3' -> '4')" in text
    assert (counts, names) == ({"seen": 1, "kept": 5}, ["a", "b"])


def test_a_dict_keyed_by_parameters_is_walked_and_put_back(device: None) -> None:
    """Of two such keys nobody asks whether they are equal: that would wait for the device, or raise."""
    model = nn.Linear(4, 4).to("cuda")
    averages = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    before = {id(key): value.clone() for key, value in averages.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for parameter, average in averages.items():
                average.lerp_(parameter, 0.1)
        return loss

    assert "capture-sync" not in {row.code for row in graph_obstacles(step, torch.ones(2, 4, device="cuda"))}
    assert all(torch.equal(value, before[id(key)]) for key, value in averages.items())
