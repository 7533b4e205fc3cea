"""graph_obstacles puts Python state back, names what no line shows, and nothing on a clean step."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graph_parts import Parts, found_in, lines_changing
from torch import nn

from perfdoctor.treat.graph_obstacles import graph_obstacles
from perfdoctor.treat.iterator_position import position

HERE = __file__
pytestmark = pytest.mark.usefixtures("emulated")


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

    assert len(found_in(HERE, graph_obstacles(step, parts.x))) == 2
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

        assert found_in(HERE, graph_obstacles(step, parts.x)) == [
            ("capture-python-state", line) for line in lines_changing(step)
        ]


def test_iterators_of_the_step_itself_are_clean() -> None:
    parts = Parts()
    names = ["a", "b"]

    def step(x: torch.Tensor) -> torch.Tensor:
        first = next(iter(parts.model.parameters()))
        factors = [1.0 for _ in zip(names, itertools.count(), strict=False)]
        return parts.trained(x, factors[0]) + 0 * first.sum()

    assert found_in(HERE, graph_obstacles(step, parts.x)) == []


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

        assert found_in(HERE, graph_obstacles(step, parts.x)) == []


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
        found = found_in(HERE, graph_obstacles(step, parts.x))
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

        assert found_in(HERE, graph_obstacles(step, parts.x)) == [
            ("capture-other-thread", line) for line in lines_changing(step)
        ]


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


def test_a_dict_keyed_by_parameters_is_walked_and_put_back() -> None:
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
