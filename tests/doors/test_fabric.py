"""A loop with Lightning Fabric through the context manager: `examples/fabric_loop.py`."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning_fabric", reason="needs lightning_fabric (it comes with pytorch-lightning)")

FILE = Path(__file__).resolve().parents[2] / "examples" / "fabric_loop.py"


def run(monkeypatch, *arguments):
    spec = importlib.util.spec_from_file_location("fabric_loop", FILE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(sys, "argv", [str(FILE), *arguments])
    return example.main()


def lines_of(report):
    return {(row.code, row.site.text) for row in (*report.findings, *report.leave_alone) if row.site is not None}


def test_the_example_on_whatever_device_there_is(monkeypatch, capsys):
    session = run(monkeypatch, "--steps", "64", "--warmup", "3", "--active", "4")
    report = session.diagnosis()
    assert session.done
    assert report.step.num_steps == 4
    assert ("host-sync", "total += loss.item()") in lines_of(report)
    assert ("pageable-copy", "for inputs, targets in session.batches(loader):") in lines_of(report)
    assert "perfdoctor: session on" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_example_on_a_gpu(monkeypatch):
    report = run(monkeypatch, "--steps", "128").diagnosis()
    assert ("host-sync", "total += loss.item()") in lines_of(report)
    assert report.accounting.busy_ns > 0
