"""DeviceMetrics where things go wrong or come in another order: devices, sinks that fail, copies."""

from __future__ import annotations

import copy
import decimal
import fractions
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from perfdoctor.emulate import emulate_cuda
from perfdoctor.errors import UsageError
from perfdoctor.treat.device_metrics import DeviceMetrics
from perfdoctor.treat.metric_readings import Reading
from perfdoctor.watch.sync_guard import sync_guard


def test_numbers_first_and_a_tensor_of_the_gpu_later() -> None:
    seen: list[tuple[int, float]] = []
    with emulate_cuda():
        metrics = DeviceMetrics(sinks=lambda reading: seen.append((reading.step, reading["rate"])))
        loss = torch.full((), 2.0, device="cuda")
        with sync_guard(budget=0):
            metrics.update(rate=0.5)
            metrics.update(rate=0.25)
            metrics.update(loss=loss, rate=0.125)
            metrics.update(loss=loss, rate=0.125)
        assert metrics.state is not None
        assert metrics.state.is_cuda
        reading = metrics.read()
    assert reading.statistics["rate"].sum == 0.5 + 0.25 + 0.125 + 0.125
    assert (reading.statistics["rate"].num_updates, reading.statistics["loss"].num_updates) == (4, 2)
    assert seen == [(1, 0.5), (2, 0.25), (3, 0.125), (4, 0.125)]


def test_a_device_that_was_asked_for_stays() -> None:
    with emulate_cuda():
        metrics = DeviceMetrics("cpu")
        metrics.update(rate=0.5)
        with pytest.raises(UsageError, match="loss is on cuda:0, the metrics are on cpu"):
            metrics.update(loss=torch.ones((), device="cuda"))


@pytest.mark.parametrize("device", ["gpu", 3.5, "meta", "cuda:7", 7, -1])
def test_a_device_that_is_none_is_named(device: Any) -> None:
    with emulate_cuda(), pytest.raises(UsageError, match=r"DeviceMetrics"):
        DeviceMetrics(device)


def test_a_gpu_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UsageError, match="torch sees no CUDA device here"):
        DeviceMetrics("cuda")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(1)]), "x is nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(()), 0.1, 0, torch.qint8), "x is quantized"),
        (lambda: torch.eye(1).to_sparse(), "x is sparse"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's own, of what is tried here
def test_tensors_without_one_plain_number(make: Callable[[], torch.Tensor], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DeviceMetrics().update(x=make())


def test_a_weight_must_be_finite() -> None:
    for weight in (math.inf, math.nan, -1.0):
        with pytest.raises(UsageError, match="finite number that is not negative"):
            DeviceMetrics().update(x=1.0, weight=weight)


def test_a_sink_that_fails_does_not_lose_the_values_behind() -> None:
    seen: list[int] = []

    def sink(reading: Reading) -> None:
        seen.append(reading.step)
        if reading.step == 2:
            raise OSError("disk full")

    with emulate_cuda():
        metrics = DeviceMetrics(sinks=sink)
        metrics.update(x=torch.zeros((), device="cuda"))
        metrics.latest()
        take, metrics._ring.take_arrived = metrics._ring.take_arrived, list  # type: ignore[method-assign]
        for value in (2.0, 3.0, 4.0):
            metrics.update(x=torch.full((), value, device="cuda"))
        metrics._ring.take_arrived = take  # type: ignore[method-assign]  # all three have come at once
        with pytest.raises(OSError, match="disk full"):
            metrics.latest()
        assert seen == [1, 2]
        assert metrics.latest().step == 4
    assert seen == [1, 2, 3, 4]


def test_it_is_not_copied() -> None:
    metrics = DeviceMetrics()
    metrics.update(x=1.0)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
            attempt(metrics)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_numbers_first_on_a_gpu() -> None:
    metrics = DeviceMetrics()
    metrics.update(loss=torch.ones((), device="cuda"), rate=0.5)  # whatever is compiled or allocated once
    metrics = DeviceMetrics()
    metrics.update(rate=0.5)
    with sync_guard(budget=0):
        metrics.update(loss=torch.full((), 2.0, device="cuda"), rate=0.25)
        metrics.update(loss=torch.full((), 4.0, device="cuda"), rate=0.25)
    reading = metrics.read()
    assert (reading.statistics["rate"].sum, reading.statistics["loss"].mean) == (1.0, 3.0)
    assert reading.step == 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (10**400, "x is too large for a float"),
        (fractions.Fraction(10**400), "x is too large for a float"),
        (np.ones(2), r"x is a ndarray of shape \(2,\)"),
        (np.ones(0), r"x is a ndarray of shape \(0,\)"),
        (np.complex64(1 + 2j), r"x is complex \(complex64\)"),
        (np.ones(1, dtype=complex), "x is complex"),
        (np.array("a"), "x is a ndarray that is no number"),
        (1j, "x is a complex"),
    ],
)
def test_what_no_float_holds_is_named(value: Any, message: str) -> None:
    metrics = DeviceMetrics()
    with pytest.raises(UsageError, match=message):
        metrics.update(x=value)
    with pytest.raises(UsageError, match=message.replace("x is", "weight is")):
        metrics.update(x=1.0, weight=value)
    assert metrics.read() == {}


@pytest.mark.parametrize(
    "three", [np.float32(3), np.array(3.0), np.array([[3]]), np.uint8(3), fractions.Fraction(3), decimal.Decimal(3)]
)
def test_numbers_of_every_kind(three: Any) -> None:
    metrics = DeviceMetrics()
    metrics.update(x=three, weight=three)
    assert (metrics.read()["x"], metrics.read().statistics["x"].sum) == (3.0, 9.0)


def test_inside_a_function_transform() -> None:
    metrics = DeviceMetrics()

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss = x.square().sum()
        metrics.update(loss=loss)
        return loss

    assert torch.func.grad(loss_of)(torch.ones(3)).tolist() == [2, 2, 2]
    assert metrics.state is not None
    assert metrics.state.data_ptr()  # memory of its own, made inside the transform
    assert metrics.read()["loss"] == 3
    with pytest.raises(UsageError, match=r"loss is one value of many inside torch\.vmap"):
        torch.func.vmap(loss_of)(torch.ones(2, 3))
    assert metrics.read().step == 1
