"""A loop with Accelerate through the context manager: `examples/accelerate_loop.py`."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

FILE = Path(__file__).resolve().parents[2] / "examples" / "accelerate_loop.py"


@pytest.fixture(autouse=True)
def _no_device_of_another_test():
    """Accelerate keeps the device of its first use for the whole process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def run(monkeypatch, *arguments):
    spec = importlib.util.spec_from_file_location("accelerate_loop", FILE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(sys, "argv", [str(FILE), *arguments])
    return example.main()


def test_the_example_on_whatever_device_there_is(monkeypatch, capsys):
    session = run(monkeypatch, "--steps", "64", "--warmup", "3", "--active", "4")
    report = session.diagnosis()
    assert session.done
    assert report.step.num_steps == 4
    assert report.micro_batches == 2  # accumulated: an update every second batch
    assert "perfdoctor: session on" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_example_on_a_gpu(monkeypatch):
    report = run(monkeypatch, "--steps", "128").diagnosis()
    found = {row.site.text: row for row in (*report.findings, *report.leave_alone) if row.site is not None}
    read = found["total += loss.item()"]
    assert read.code == "host-sync"
    assert read.count == pytest.approx(2.0)  # one a micro-batch
    assert report.accounting.busy_ns > 0
    assert torch.cuda.is_initialized()
