"""The benchmark's own trace: what its writer says of it is true, and every reader takes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfdoctor.bench.parse import Result, available_readers, main, measure, misses
from perfdoctor.bench.synthetic_trace import write_trace
from perfdoctor.bench.trace_checks import check_kineto
from perfdoctor.record.load import load_capture
from perfdoctor.record.summary import summarise


def test_figures_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    said = write_trace(path, 700_000)
    events = json.loads(path.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(events) == said.num_events
    assert len(kernels) == said.num_kernels
    assert round(sum(e["dur"] for e in kernels) * 1000) + 2000 * said.num_steps == said.busy_ns
    found = summarise(load_capture(path))
    assert (found["kernels"], found["steps"], found["syncs"]) == (said.num_kernels, said.num_steps, said.num_syncs)
    assert found["gpu_busy_us"] * 1000 == said.busy_ns


def test_same_size_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_trace(tmp_path / name, 50_000)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_checker_finds_what_is_wrong(tmp_path: Path) -> None:
    """The checker of the traces is no rubber stamp: a capture of another file does not pass."""
    write_trace(tmp_path / "a.json", 50_000)
    text = (tmp_path / "a.json").read_text()
    (tmp_path / "b.json").write_text(text.replace('"dur": 62.125', '"dur": 62.126', 1))
    (tmp_path / "c.json").write_text(text.replace("cudaStreamSynchronize", "cudaEventSynchronize", 1))
    capture = load_capture(tmp_path / "a.json")
    assert check_kineto(tmp_path / "a.json", capture) == []
    assert len(check_kineto(tmp_path / "b.json", capture)) == 1
    assert len(check_kineto(tmp_path / "c.json", capture)) == 1


def test_bounds() -> None:
    ours = Result(reader="perfdoctor", seconds=(1.0, 1.2, 1.1), peak_bytes=(50, 60, 70))
    fast, slow = (
        Result(reader="orjson, GC off", seconds=(1.5,), peak_bytes=(900,)),
        Result(reader="HTA json", seconds=(9.0,), peak_bytes=(1,)),
    )
    assert misses(100, [ours, fast, slow]) == []
    assert len(misses(70, [ours, fast, slow])) == 1
    assert len(misses(100, [ours, Result(reader="orjson, GC off", seconds=(1.0,), peak_bytes=(1,))])) == 1
    assert len(misses(100, [ours, Result(reader="HTA json", seconds=(5.0,), peak_bytes=(1,))])) == 1
    assert "failed" in misses(100, [Result(reader="perfdoctor", error="died")])[0]


def test_measure_runs_each_reader_in_a_process(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, 200_000)
    ours, missing = measure(path, ["perfdoctor", "nobody"], rounds=2)
    assert len(ours.seconds) == 2
    assert min(ours.seconds) > 0
    assert "nobody" in missing.error
    assert "perfdoctor" in available_readers()


def test_main_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, 2_000_000)
    assert main([str(path), "--only", "perfdoctor", "--rounds", "1"]) in (0, 1)
    assert "MB/s" in capsys.readouterr().out
