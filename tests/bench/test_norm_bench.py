"""The norm benchmark: what it measures on, what a measurement is, and that it runs small on the CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from perfdoctor.bench import norm
from perfdoctor.bench.gradient_sets import GRADIENT_SETS, SMALL_SETS, resnet50, transformer
from perfdoctor.bench.measurement import Measurement, measure


def num_elements(shapes: list[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def test_sets_have_the_sizes_of_their_models() -> None:
    assert len(resnet50()) == 161
    assert num_elements(resnet50()) == 25_557_032  # torchvision's resnet50
    assert len(transformer(768, 12)) == 148
    assert num_elements(transformer(768, 12)) == 124_439_808  # GPT-2 small, tied embeddings
    assert num_elements(GRADIENT_SETS[-1].shapes()) == pytest.approx(6.65e9, rel=0.01)


def test_a_measurement_carries_its_doubt() -> None:
    steady = Measurement(name="steady", times_ns=(100.0, 100.0, 101.0, 99.0, 100.0))
    assert steady.median_ns == 100.0
    assert steady.spread == 0.0
    assert steady.warning is None
    noisy = Measurement(name="noisy", times_ns=(100.0, 100.0, 200.0, 300.0, 300.0))
    assert noisy.median_ns == 200.0
    assert noisy.spread == 1.0  # the quartiles are 100 and 300
    assert "100 %" in str(noisy.warning)
    assert "only 2 times" in str(Measurement(name="few", times_ns=(1.0, 1.0)).warning)


def test_measure_counts_and_divides() -> None:
    calls: list[str] = []
    measurement = measure(
        "x", lambda: calls.append("run"), lambda: calls.append("settle"), repeats=3, warmup=2, per_run=4
    )
    assert calls == ["run", "run", "settle", *["run", "settle"] * 3]
    assert len(measurement.times_ns) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the large sets there")
def test_runs_small_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "norm.json"
    assert norm.main(["--json", str(file), "--only", "1 x 1024"]) == 0
    (row,) = json.loads(file.read_text("utf-8"))["sets"]
    assert row["name"] == SMALL_SETS[0].name
    assert row["relative_error"] < 1e-6
    assert row["same_bits"] is True
    assert {"grad_norm | wall", "loop + item | wall"} <= {each["name"] for each in row["measurements"]}
    assert "wall, verified" in capsys.readouterr().out


def test_a_failing_candidate_is_a_line_not_the_end() -> None:
    row: norm.Row = {}

    def fail() -> None:
        raise RuntimeError("out of memory")

    assert norm._guarded(row, "big one", fail) is None
    assert row["errors"] == ["big one: RuntimeError: out of memory"]
