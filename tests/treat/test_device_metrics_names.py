"""DeviceMetrics whose names change their kind, whose sinks or torchmetrics objects fail, and what is built late."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torchmetrics

from perfdoctor.errors import UsageError
from perfdoctor.treat.device_metrics import DeviceMetrics


@pytest.fixture
def device(computing_device: str) -> str:
    return computing_device


class _Failing(torchmetrics.Metric):
    """Gives a vector, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(3))
        self.error = error

    def update(self, value: torch.Tensor) -> None:
        self.seen += value

    def compute(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.seen


@pytest.mark.parametrize("error", [None, ArithmeticError("no result")])
def test_an_object_that_cannot_be_computed_does_not_keep_the_others_from_being_read(
    device: str, error: Exception | None
) -> None:
    broken = _Failing(error).to(device)
    broken.update(torch.ones(3, device=device))
    metrics = DeviceMetrics(every=2)
    metrics.update(loss=1.0, broken=broken)
    with pytest.raises(UsageError if error is None else ArithmeticError):
        metrics.update(loss=2.0, broken=broken)
    metrics.update(loss=3.0)
    assert dict(metrics.read()) == {"loss": 3.0}


def test_the_newest_value_of_a_name_counts_whatever_its_kind(device: str) -> None:
    mean = torchmetrics.MeanMetric().to(device)
    mean.update(torch.tensor(1.0, device=device))
    metrics = DeviceMetrics()
    for _ in range(2):
        metrics.update(value=mean)
        assert metrics.read()["value"] == 1.0
        metrics.update(value=torch.tensor(7.0, device=device), loss=2.0)
        assert dict(metrics.read()) == {"value": 7.0, "loss": 2.0}


def test_a_result_with_the_name_of_another_value_is_refused(device: str) -> None:
    collection = torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric()}).to(device)
    collection.update(torch.tensor(1.0, device=device))
    for values in ({"v": collection, "v/mean": 5.0}, {"v/mean": 5.0, "v": collection}):
        metrics = DeviceMetrics()
        metrics.update(loss=1.0)
        with pytest.raises(UsageError, match="v/mean twice"):
            metrics.update(values)
        assert dict(metrics.read()) == {"loss": 1.0}


def test_each_sink_gets_every_reading_also_behind_one_that_raises(device: str) -> None:
    got: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    def sink(name: str, bad_step: int) -> Any:
        def take(reading: Any) -> None:
            got[name].append(reading.step)
            if reading.step == bad_step:
                raise OSError(name)

        return take

    metrics = DeviceMetrics(sinks=[sink("a", 2), sink("b", 2), sink("c", 3)])
    raised = []
    for step in range(1, 5):
        try:
            metrics.update(loss=float(step))
        except OSError as error:
            raised.append(str(error))
    metrics.read()
    assert raised == ["a", "c"]
    assert got == {name: [1, 2, 3, 4] for name in got}


def test_a_weight_with_a_gradient_graph_is_left_alone() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    metrics = DeviceMetrics()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.update(loss=(weight * 3).sum(), weight=weight)
        metrics.update(loss=1.0, weight=weight * 1)
    assert metrics.read().statistics["loss"].sum == 2 * 6 + 2 * 1


def test_latest_is_that_of_the_last_copy_whenever_it_is_asked(device: str) -> None:
    asked, late = DeviceMetrics(every=2), DeviceMetrics(every=2)
    for step in range(1, 8):
        for metrics in (asked, late):
            metrics.update(loss=torch.tensor(float(step), device=device))
        reading = asked.latest()
        assert (reading.step, dict(reading)) == (step // 2 * 2, {"loss": float(step // 2 * 2)} if step > 1 else {})
    assert late.latest().step == asked.latest().step == 6
    assert dict(late.latest()) == dict(asked.latest()) == {"loss": 6.0}
    assert late.read().step == late.latest().step == 7
