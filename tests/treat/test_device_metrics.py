"""Metrics accumulated on the device: by hand here and on the emulated device; the `gpu` file has the real one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st

import perfdoctor
from perfdoctor.emulate import emulate_cuda
from perfdoctor.errors import SyncBudgetExceeded, UsageError
from perfdoctor.treat.device_metrics import DeviceMetrics
from perfdoctor.treat.metric_readings import Reading
from perfdoctor.watch.sync_guard import sync_guard


def test_statistics_by_hand() -> None:
    metrics = DeviceMetrics(ema_decay=0.5)
    for value, weight in ((1.0, 1.0), (4.0, 3.0), (2.0, 4.0)):
        metrics.update(loss=torch.tensor(value), weight=weight)
    loss = metrics.read().statistics["loss"]
    assert (loss.sum, loss.weight, loss.mean) == (1 + 12 + 8, 8, 21 / 8)
    assert (loss.last, loss.min, loss.max, loss.num_updates) == (2, 1, 4, 3)
    # 0.5, then 0.25 + 2, then 1.125 + 1 = 2.125, over 0.875 of the weight of an endless average
    assert loss.ema == pytest.approx(2.125 / 0.875, rel=1e-15)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 50)), min_size=1, max_size=12))
def test_against_exact_sums(pairs: list[tuple[float, int]]) -> None:
    metrics = DeviceMetrics()
    for value, weight in pairs:
        metrics.update({"a/b": torch.tensor(value, dtype=torch.float64)}, weight=weight)
    got = metrics.read().statistics["a/b"]
    total, weight = math.fsum(v * w for v, w in pairs), sum(w for _, w in pairs)
    assert got.sum == pytest.approx(total, rel=1e-12, abs=1e-6)
    assert got.mean == pytest.approx(total / weight, rel=1e-12, abs=1e-6) if weight else math.isnan(got.mean)
    assert (got.min, got.max) == (min(v for v, _ in pairs), max(v for v, _ in pairs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_types_are_added_wide(dtype: torch.dtype) -> None:
    metrics = DeviceMetrics()
    one = torch.ones(1, 1).to(dtype)
    for _ in range(300):  # in bf16 itself, 256 + 1 is 256
        metrics.update(x=one, n=7, flag=True)
    reading = metrics.read()
    assert (reading.statistics["x"].sum, reading.statistics["n"].sum, reading["flag"]) == (300, 2100, 1)


def test_nan_as_torch_has_it() -> None:
    metrics = DeviceMetrics()
    values = torch.tensor([1.0, math.nan, 3.0])
    for value in values:
        metrics.update(x=value)
    got = metrics.read().statistics["x"]
    assert all(math.isnan(number) for number in (values.min(), values.max(), values.mean()))
    assert all(math.isnan(number) for number in (got.min, got.max, got.mean, got.sum, got.ema))
    assert got.last == 3
    metrics.reset()
    metrics.update(x=2.0)
    again = metrics.read()
    assert (again.statistics["x"].max, again.statistics["x"].mean, again.step) == (2, 2, 4)


def test_reset_leaves_the_steps() -> None:
    metrics = DeviceMetrics(start_step=100)
    assert metrics.latest() == {}
    assert metrics.latest().step == 100
    metrics.update(x=5.0)
    metrics.reset()
    reading = metrics.read()
    got = reading.statistics["x"]
    assert reading.step == 101
    assert (got.sum, got.weight) == (0, 0)
    assert all(math.isnan(number) for number in (got.mean, got.last, got.min, got.max, got.ema))


def test_some_metrics_in_some_updates() -> None:
    metrics = DeviceMetrics(statistic="sum")
    for step in range(6):
        values = {f"m{index}": float(index) for index in range(40) if (index + step) % 2}  # more than one launch takes
        metrics.update(values)
    reading = metrics.read()
    assert reading == {f"m{index}": 3.0 * index for index in range(40)}
    assert reading.step == 6


def test_no_sync_and_every(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Reading] = []
    with emulate_cuda():
        metrics = DeviceMetrics(every=3, sinks=seen.append)
        model = torch.nn.Linear(4, 1).cuda()
        losses = []
        with sync_guard(budget=0):
            for step in range(10):
                loss = model(torch.randn(8, 4, device="cuda")).square().mean()
                loss.backward()
                losses.append(loss.detach())
                metrics.update(loss=loss, half=loss.bfloat16(), rate=0.1 * step, weight=loss.new_full((), 2.0))
                latest = metrics.latest()
                assert latest.step == 3 * ((step + 1) // 3)
        assert loss.requires_grad
        expected = [float(value) for value in losses]
        reading = metrics.read()
    assert [reading.step for reading in seen] == [3, 6, 9]
    assert [reading["loss"] for reading in seen] == [expected[2], expected[5], expected[8]]
    assert reading.step == 10
    assert reading.statistics["loss"].mean == pytest.approx(sum(expected) / 10, rel=1e-9)
    assert reading.statistics["loss"].weight == 20


def test_reading_is_a_sync_and_the_copy_is_not_read_early() -> None:
    with emulate_cuda():
        metrics = DeviceMetrics()
        with sync_guard(budget=0):
            metrics.update(x=torch.ones((), device="cuda"))
            metrics.flush()
        with pytest.raises(SyncBudgetExceeded), sync_guard(budget=0):
            metrics.read()


def test_sinks(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    class Logger:
        def __init__(self) -> None:
            self.lines: list[tuple[dict[str, float], int]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.lines.append((metrics, step or 0))

    logger, steps = Logger(), []
    writer = SummaryWriter(str(tmp_path))
    metrics = DeviceMetrics(sinks=[writer, logger, lambda reading: steps.append(reading.step)], statistic="mean")
    for value in (1.0, 2.0, 6.0):
        metrics.update({"train/loss": torch.tensor(value)})
    metrics.read()
    writer.close()
    assert logger.lines == [({"train/loss": 1.0}, 1), ({"train/loss": 1.5}, 2), ({"train/loss": 3.0}, 3)]
    assert steps == [1, 2, 3]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 1.5), (3, 3.0)]


def test_a_lightning_logger(tmp_path: Path) -> None:
    loggers = pytest.importorskip("pytorch_lightning.loggers", reason="pytorch_lightning is not installed")
    logger = loggers.CSVLogger(str(tmp_path))
    metrics = DeviceMetrics(sinks=logger)
    metrics.update(loss=3.0)
    metrics.update(loss=4.0)
    metrics.read()
    logger.save()
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().split()
    assert lines == ["loss,step", "3.0,1", "4.0,2"]


def test_a_value_goes_out_once_and_one_update_after_it_arrived_at_most() -> None:
    seen: list[int] = []
    metrics = DeviceMetrics(sinks=lambda reading: seen.append(reading.step))
    for step in range(1, 5):
        metrics.update(x=float(step))
        assert seen == list(range(1, step + 1))  # on the CPU a copy has arrived when it was made
    metrics.latest()
    metrics.latest()
    assert seen == [1, 2, 3, 4]


def test_torchmetrics_compute_when_a_value_is_due() -> None:
    torch.manual_seed(0)
    with emulate_cuda():
        accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro", validate_args=False).cuda()
        calls = []
        compute = accuracy.compute
        accuracy.compute = lambda: calls.append(1) or compute()
        metrics = DeviceMetrics(every=4)
        right = total = torch.zeros((), dtype=torch.int64)
        with sync_guard(budget=0):
            for _ in range(10):
                guess, label = torch.randint(0, 3, (2, 16), device="cuda")
                accuracy.update(guess, label)
                right = right + (guess == label).sum()
                total = total + 16
                metrics.update(acc=accuracy, loss=torch.ones((), device="cuda"))
            assert metrics.latest().step == 8
        assert len(calls) == 2
        reading = metrics.read()
        assert reading.step == 10
        assert reading["acc"] == pytest.approx(float(right) / float(total), rel=1e-6)
        assert metrics.read() == reading
        accuracy.reset()
        metrics.update(acc=accuracy, loss=1.0)  # never updated since: it is left out


def test_a_collection_of_torchmetrics() -> None:
    collection = torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.MaxMetric()])
    metrics = DeviceMetrics()
    metrics.update(m=collection, loss=0.0)
    for value in (1.0, 2.0, 6.0):
        collection.update(value)
        metrics.update(m=collection)
    assert metrics.latest() == {"loss": 0.0, "m/MeanMetric": 3.0, "m/MaxMetric": 6.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "got no metric"),
        ({"loss": torch.ones(3)}, r"loss has the shape \(3,\): expected one element, e\.g\. loss\.mean\(\)"),
        ({"loss": torch.ones(0)}, "expected one element"),
        ({"loss": torch.ones((), dtype=torch.complex64)}, "complex"),
        ({"loss": "0.3"}, "loss is a str"),
        ({"loss": None}, "loss is a NoneType"),
        ({"loss": torch.ones((), device="meta")}, "meta"),
        ({"loss": torch.ones(1).to_sparse()}, "sparse"),
        ({"": 1.0}, "no name"),
        ({"a": 1.0, "weight": [1]}, "no name|is a list"),
        ({f"m{index}": 1.0 for index in range(64)}, "'m63' would be metric 64: a DeviceMetrics holds 63"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], message: str) -> None:
    metrics = DeviceMetrics()
    with pytest.raises(UsageError, match=message):
        metrics.update(values)
    metrics.update(fine=1.0)
    assert metrics.read()["fine"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 2.5}, r"every=2\.5"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"statistic": "median"}, "expected one of mean"),
        ({"sinks": 3}, "int is none: pass a SummaryWriter"),
        ({"sinks": dict}, "dict is a class"),
        ({"start_step": "7"}, "start_step"),
        ({"kernel": "cuda"}, "kernel='cuda'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DeviceMetrics(**options)


def test_what_has_no_name_or_one_twice() -> None:
    metrics = DeviceMetrics()
    with pytest.raises(UsageError, match=r"got a Tensor without a name: pass update\(loss=\.\.\.\)"):
        metrics.update(torch.ones(()))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="got x twice"):
        metrics.update({"x": 1.0}, x=2.0)
    with pytest.raises(UsageError, match="DeviceMetrics on meta: expected a CUDA device"):
        DeviceMetrics("meta")
    assert metrics.read() == {}


def test_a_negative_weight_and_an_unknown_name() -> None:
    metrics = DeviceMetrics()
    with pytest.raises(UsageError, match="weight=-1"):
        metrics.update(x=1.0, weight=-1)
    metrics.update(x=1.0, weight=torch.tensor(2))
    assert metrics.read().statistics["x"].weight == 2
    with pytest.raises(KeyError, match=r"no metric 'y' \(there are: x\)"):
        metrics.latest()["y"]


def test_a_sink_that_fails_says_so_and_the_rest_goes_on() -> None:
    seen = []

    def sink(reading: Reading) -> None:
        seen.append(reading.step)
        if reading.step == 1:
            raise OSError("disk full")

    metrics = DeviceMetrics(sinks=sink)
    with pytest.raises(OSError, match="disk full"):
        metrics.update(x=1.0)
    metrics.update(x=3.0)
    assert metrics.read().statistics["x"].sum == 4.0
    assert seen == [1, 2]


def test_two_ranks(tmp_path: Path) -> None:
    """Two gloo processes with other values, weights, and one metric that only one of them has."""
    script = Path(__file__).parent / "metrics_process.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(perfdoctor.__file__).parents[1])}
    environment.pop("PYTEST_ADDOPTS", None)
    processes = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path)], env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    first, second = (json.loads(out) for out, _ in outputs)
    assert first["all"] == second["all"]
    loss = first["all"]["loss"]
    # rank 0: 1 x 1 and 2 x 3 (weights 1, 3); rank 1: 10 x 4 (weight 4)
    assert (loss["sum"], loss["weight"], loss["mean"]) == (1 + 6 + 40, 8, 47 / 8)
    assert (loss["min"], loss["max"], loss["last"]) == (1, 10, (2 + 10) / 2)
    assert first["all"]["only"]["mean"] == 5
    assert first["all"]["accuracy"]["last"] == pytest.approx(4 / 6)  # 1 of 2 right, 3 of 4 right
    assert (first["alone"]["loss"]["mean"], second["alone"]["loss"]["mean"]) == (7 / 4, 10)
    assert (first["alone"]["accuracy"]["last"], second["alone"]["accuracy"]["last"]) == (0.5, 0.75)
