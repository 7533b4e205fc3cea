"""Metrics on a GPU: nothing waits, one launch an update, graphs replay it, and values come late but whole."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import nn

from perfdoctor.errors import UsageError
from perfdoctor.kernels import kernel_launch, walker
from perfdoctor.kernels.metrics_launch import READABLE
from perfdoctor.treat import host_ring
from perfdoctor.treat.device_metrics import DeviceMetrics
from perfdoctor.treat.metric_readings import Reading
from perfdoctor.watch.sync_guard import sync_guard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
ONE_CYCLE = pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle:UserWarning")
LONG = 500_000_000  # cycles: about a quarter of a second


def test_no_sync_in_the_loop() -> None:
    seen: list[Reading] = []
    model = nn.Linear(64, 1, device="cuda")
    metrics = DeviceMetrics(every=5, sinks=seen.append)
    metrics.update(loss=torch.zeros((), device="cuda"), half=1.0, rate=0.0)
    losses = [torch.zeros((), device="cuda")]
    with sync_guard(budget=0):
        for step in range(2, 101):
            loss = model(torch.randn(32, 64, device="cuda")).square().mean()
            losses.append(loss.detach())
            metrics.update(loss=loss, half=loss.bfloat16(), rate=0.1 * step)
            metrics.latest()
    reading = metrics.read()
    exact = torch.stack(losses).double().cpu()
    assert reading.step == 100
    assert reading.statistics["loss"].mean == pytest.approx(float(exact.mean()), rel=1e-12)
    assert reading["rate"] == 0.1 * 100
    assert [got.step for got in seen] == list(range(5, 101, 5))
    assert [got["loss"] for got in seen] == [float(exact[got.step - 1]) for got in seen]


def test_latest_does_not_wait() -> None:
    metrics = DeviceMetrics()
    metrics.update(x=torch.ones((), device="cuda"))
    torch.cuda.synchronize()
    assert metrics.latest() == {"x": 1.0}
    torch.cuda._sleep(LONG)
    with sync_guard(budget=0):
        for number in range(40):
            metrics.update(x=torch.full((), 2.0 + number, device="cuda"))
            assert metrics.latest() == {"x": 1.0}  # the device sleeps still
    assert metrics.num_left_out == 8  # of 40 there is room for 32
    torch.cuda.synchronize()
    late = metrics.latest()
    assert (late.step, late["x"]) == (33, 33.0)
    assert metrics.read() == {"x": 41.0}


def test_the_kernel_as_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    both = [DeviceMetrics(kernel=kernel) for kernel in ("triton", "torch")]
    for step in range(20):
        numbers = torch.randn(40, generator=generator, dtype=torch.float64) * 50
        values: dict[str, Any] = {}
        for index, number in enumerate(numbers):
            dtype = READABLE[index % len(READABLE)]
            values[f"m{index}"] = float(number) if index % 4 == 0 else number.to("cuda").to(dtype)
        values["odd"] = torch.arange(12.0, device="cuda").view(3, 4)[1, 2:3]
        values["zero"] = 0.0 if step % 2 else -math.pi
        for metrics in both:
            metrics.update(values, weight=step if step % 3 else torch.full((), 2, device="cuda"))
    states = [metrics.state for metrics in both]
    torch.testing.assert_close(states[0], states[1], rtol=1e-12, atol=1e-9)
    if walker.compiled_walker() is not None:
        assert len(both[0]._launcher._prepared) > 0  # the later launches did not go through Triton


@ONE_CYCLE  # there is only one cycle
def test_one_launch_an_update() -> None:
    metrics = DeviceMetrics(every=100)
    values = [torch.randn((), device="cuda") for _ in range(15)]

    def update() -> None:
        metrics.update({f"m{index}": value for index, value in enumerate(values)}, rate=0.5)

    update()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            update()
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 10
    assert all("metrics_kernel" in name for name in kernels)


def test_in_a_graph() -> None:
    x = torch.zeros((), device="cuda")
    metrics = DeviceMetrics(device="cuda", ema_decay=0.5)
    seen: list[tuple[int, float]] = []
    metrics._sinks = (lambda reading: seen.append((reading.step, reading["x"])),)
    with pytest.raises(UsageError, match="first update"), torch.cuda.graph(torch.cuda.CUDAGraph()):  # noqa: PT012
        x + 1.0  # torch warns about a graph with nothing in it
        DeviceMetrics().update(x=x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metrics.update(x=x + 1.0, weight=x)
        assert metrics.latest() == {}
        with pytest.raises(UsageError, match="flush"):
            metrics.flush()
    with sync_guard(budget=0):
        for step in range(1, 9):
            x.fill_(float(step))
            graph.replay()
            metrics.flush()
    torch.cuda.synchronize()
    assert metrics.latest().step == 8
    assert seen == [(step, step + 1.0) for step in range(1, 9)]
    value = metrics.read().statistics["x"]
    assert value.mean == sum(step * (step + 1) for step in range(1, 9)) / 36
    assert (value.min, value.max, value.num_updates) == (2, 9, 8)
    metrics.reset()
    graph.replay()
    assert metrics.read().statistics["x"].sum == 8 * 9.0
    assert metrics.latest().step == 9


def test_latest_starts_the_copy_of_a_graph() -> None:
    x = torch.ones((), device="cuda")
    metrics = DeviceMetrics(every=10)
    metrics.update(x=x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metrics.update(x=x)
    graph.replay()
    metrics.latest()
    torch.cuda.synchronize()
    assert metrics.latest().step == 2


def test_inference_mode_and_other_streams() -> None:
    metrics = DeviceMetrics()
    with torch.inference_mode():
        metrics.update(x=torch.ones((), device="cuda"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        metrics.update(x=torch.full((), 3.0, device="cuda"))
    torch.cuda.current_stream().wait_stream(side)
    metrics.update(x=5.0)
    assert metrics.read().statistics["x"].sum == 9


def test_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    metrics = DeviceMetrics()
    metrics.update(x=torch.ones((), device="cuda:1"))
    metrics.update(x=torch.ones((), device="cuda:1"))
    with pytest.raises(UsageError, match="x is on cuda:0, the metrics are on cuda:1"):
        metrics.update(x=torch.ones((), device="cuda:0"))
    assert metrics.read().statistics["x"].sum == 2


@pytest.mark.parametrize("compiled", [True, False])
def test_with_and_without_the_compiled_walker(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(host_ring, "compiled_walker", lambda: None)
        monkeypatch.setattr(kernel_launch, "compiled_walker", lambda: None)
    elif walker.compiled_walker() is None:
        pytest.skip("needs a C++ compiler")
    seen: list[tuple[int, float]] = []
    metrics = DeviceMetrics(sinks=lambda reading: seen.append((reading.step, reading["x"])))
    for step in range(1, 200):
        metrics.update(x=torch.full((), float(step), device="cuda"), rate=0.25)
        if step % 20 == 0:
            torch.cuda.synchronize()
    assert bool(metrics._ring.addresses) is compiled
    assert bool(metrics._known) is compiled
    assert bool(metrics._launcher._prepared) is compiled
    assert metrics.read().statistics["x"].sum == 199 * 200 / 2
    assert seen == [(step, float(step)) for step in range(1, 200)]


def test_metrics_that_go_while_copies_are_on_their_way() -> None:
    """Their pinned memory is not given to others before the copies are done."""
    metrics = DeviceMetrics()
    metrics.update(x=torch.ones((), device="cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    for _ in range(10):
        metrics.update(x=torch.full((), math.pi, device="cuda"))
    del metrics
    gc.collect()
    others = [torch.zeros(32, 64, 8, dtype=torch.float64).pin_memory() for _ in range(4)]
    torch.cuda.synchronize()
    assert not any(other.any() for other in others)


def test_a_value_inside_a_function_transform() -> None:
    metrics = DeviceMetrics(statistic="sum")

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss = x.square().sum()
        metrics.update(loss=loss)
        return loss

    for _ in range(3):
        torch.func.grad(loss_of)(torch.ones(3, device="cuda"))
    assert metrics.read()["loss"] == 9
