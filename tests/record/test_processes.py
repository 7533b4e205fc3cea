"""Files of several processes: threads that share a number stay apart, and a page is of one of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_rows import Row, document, kernel, two_steps

from perfdoctor.record.capture import Capture
from perfdoctor.record.kineto import read_kineto
from perfdoctor.record.processes import PROCESS, numbered
from perfdoctor.record.summary import summarise
from perfdoctor.record.timeline import Timeline


def rank(pid: int, device: int, later_us: float = 0.0, correlation: int = 0) -> list[Row]:
    """The two steps of the small trace, of another process and on another device. Its thread has the same number."""
    rows = two_steps()
    for each in rows:
        args = each["args"]
        each["ts"] += later_us
        each["pid"] = device if "device" in args else pid
        args |= {"device": device} if "device" in args else {}
        args |= {"correlation": args["correlation"] + correlation} if "correlation" in args else {}
    return rows


def read(folder: Path, rows: list[Row]) -> Capture:
    path = folder / "trace.json"
    path.write_text(json.dumps(document(rows)))
    return read_kineto(path)


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("interleaved", [True, False])
def test_a_merged_file_is_judged_by_one_process(tmp_path: Path, device: int, interleaved: bool) -> None:
    rows = [*rank(10, 0), *rank(20, device, later_us=33.0, correlation=1000)]
    found = read(tmp_path, sorted(rows, key=lambda row: row["ts"]) if interleaved else rows)
    assert [note.code for note in found.notes] == ["several-processes"]
    alone, line = Timeline(read(tmp_path, rank(10, 0))), Timeline(found)
    assert len(found.calls) == 12
    assert len(found.steps) == 2
    assert line.calls.start_ns.tolist() == alone.calls.start_ns.tolist()
    assert line.work.start_ns.tolist() == alone.work.start_ns.tolist()
    assert line.call_of_work.tolist() == alone.call_of_work.tolist()
    assert len(line.capture.ops) == len(line.capture.frames) == 2


def test_without_marks_the_busiest_process_is_judged(tmp_path: Path) -> None:
    rows = [*rank(10, 0), *rank(20, 1, correlation=1000), kernel(200.0, 50.0, 1060, 7) | {"pid": 1}]
    rows[-1]["args"]["device"] = 1
    line = Timeline(read(tmp_path, [row for row in rows if row["cat"] != "user_annotation"]))
    assert set(line.work.device.tolist()) == {1}
    assert len(line.calls) == 6


def test_one_process_keeps_its_thread_numbers(tmp_path: Path) -> None:
    rows = [row | {"tid": 140_000_000_000_123} if row["pid"] == 10 else row for row in two_steps()]
    found = read(tmp_path, rows)
    assert set(found.calls.thread.tolist()) == {140_000_000_000_123}
    assert found.notes == ()


@given(st.lists(st.tuples(st.integers(-3, 5), st.integers(-(2**62), 2**62)), min_size=1, max_size=30))
def test_numbers_are_equal_where_process_and_thread_are(pairs: list[tuple[int, int]]) -> None:
    table = np.array(pairs, np.int64)
    numbers = numbered(table[:, 0], table[:, 1]).tolist()
    assert len(set(zip(numbers, pairs, strict=True))) == len(set(numbers)) == len(set(pairs))
    owners = [number & PROCESS for number in numbers]
    assert len(set(zip(owners, table[:, 0].tolist(), strict=True))) == len(set(owners)) == len({p for p, _ in pairs})


def test_the_busiest_device_is_the_same_for_everyone(tmp_path: Path) -> None:
    """Many short kernels on another device make it no busier."""
    short = [kernel(200.0 + 2 * i, 1.0, 5000 + i) for i in range(40)]
    for each in short:
        each["args"]["device"] = each["pid"] = 1
    path = tmp_path / "trace.json"
    gpus = [{"id": 0, "name": "first"}, {"id": 1, "name": "second"}]
    path.write_text(json.dumps(document([*two_steps(), *short], deviceProperties=gpus)))
    found = read_kineto(path)
    assert summarise(found)["gpu_busy_us"] == 64
    assert set(Timeline(found).work.device.tolist()) == {0}
    assert found.environment.gpu == "first"
