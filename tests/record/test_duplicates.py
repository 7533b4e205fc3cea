"""Rows that a file holds twice count once, and rows that only look alike count as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trace_rows import document, kernel, launch, row, two_steps

from perfdoctor.record.capture import Capture
from perfdoctor.record.kineto import read_kineto
from perfdoctor.record.load import load_capture
from perfdoctor.record.summary import summarise


def read(folder: Path, content: Any) -> Capture:
    path = folder / "trace.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_kineto(path)


def codes(capture: Capture) -> dict[str, int]:
    return {note.code: note.count for note in capture.notes}


@pytest.mark.parametrize("times", [2, 3])
def test_rows_in_the_file_several_times(tmp_path: Path, times: int) -> None:
    whole = read(tmp_path, document(two_steps()))
    found = read(tmp_path, document(two_steps() * times))
    assert summarise(found) == summarise(whole)
    assert {name: len(getattr(found, name)) for name in Capture.TABLES} == {
        name: len(getattr(whole, name)) for name in Capture.TABLES
    }
    assert codes(found) == {"duplicate-rows": (times - 1) * len(two_steps())}


def test_two_documents_in_one_file(tmp_path: Path) -> None:
    text = json.dumps(document(two_steps()))
    found = summarise(read(tmp_path, text + "\n" + text))
    assert {k: found[k] for k in ("kernels", "memcpys", "syncs", "steps", "gpu_busy_us")} == {
        "kernels": 2,
        "memcpys": 2,
        "syncs": 2,
        "steps": 2,
        "gpu_busy_us": 64,
    }


@pytest.mark.parametrize(
    "twins",
    [
        [kernel(300.0, 5.0, 90), kernel(300.0, 5.0, 91)],  # launched by two calls
        [kernel(300.0, 5.0, 90), kernel(300.0, 5.0, 90, stream=8)],
        [kernel(300.0, 5.0, 90), kernel(300.0, 5.5, 90)],
        [kernel(300.0, 0.0, 90), kernel(300.0, 0.0, 90)],
        [row("cpu_op", "aten::to", 300.0, 2.0), row("cpu_op", "aten::to", 300.0, 2.0)],  # one calls the other
    ],
)
def test_rows_that_only_look_alike_stay(tmp_path: Path, twins: list[Any]) -> None:
    found = read(tmp_path, document([*two_steps(), *twins]))
    assert len(found.work) + len(found.ops) == 6 + len(twins)
    assert "duplicate-rows" not in codes(found)


def test_twin_nodes_of_a_graph_stay_unless_its_launch_is_there_twice(tmp_path: Path) -> None:
    graph = [
        launch(290.0, 90, "cudaGraphLaunch"),
        kernel(300.0, 5.0, 90),
        kernel(300.0, 5.0, 90),
        kernel(306.0, 5.0, 90),
    ]
    assert summarise(read(tmp_path, document(graph)))["kernels"] == 3
    assert summarise(read(tmp_path, document(graph + graph[:1] + graph[1::2])))["kernels"] == 2


def test_a_list_that_is_empty_before_the_one_with_the_events(tmp_path: Path) -> None:
    whole = json.dumps(document(two_steps()))
    wanted = summarise(read(tmp_path, whole))
    for before in ('{"traceEvents": [], ', '{"note": {"traceEvents": [ ]}, ', '{"x": "' + "y" * 2**20 + '", '):
        found = load_capture(read(tmp_path, before + whole[1:]).path)
        assert summarise(found) == wanted
        assert found.notes == ()
