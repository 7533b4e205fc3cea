"""Events written as a beginning and an end give what complete events give."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_rows import Row, document, kernel, launch, two_steps

from perfdoctor.record import event_halves, kineto
from perfdoctor.record.capture import Capture
from perfdoctor.record.event_halves import read_events
from perfdoctor.record.kineto import read_kineto
from perfdoctor.record.summary import summarise


def halves(row: Row, named_end: bool = True) -> list[Row]:
    """The two events that stand for a complete one."""
    begin = {key: value for key, value in row.items() if key != "dur"} | {"ph": "B"}
    end = {"ph": "E", "pid": row["pid"], "tid": row["tid"], "ts": row["ts"] + row["dur"]}
    return [begin, end | ({"name": row["name"]} if named_end else {})]


def read(path: Path, rows: list[Any]) -> Capture:
    path.write_text(json.dumps(document(rows)))
    return read_kineto(path)


@pytest.mark.parametrize("named_end", [True, False])
@pytest.mark.parametrize("cats", [{"kernel"}, {"user_annotation"}, {"cuda_runtime", "gpu_memcpy"}, None])
def test_pairs_are_complete_events(tmp_path: Path, named_end: bool, cats: set[str] | None) -> None:
    paired = [
        half
        for row in two_steps()
        for half in (halves(row, named_end) if cats is None or row["cat"] in cats else [row])
    ]
    paired.sort(key=lambda row: row["ts"])
    found = read(tmp_path / "pairs.json", paired)
    assert summarise(found) == summarise(read(tmp_path / "whole.json", two_steps()))
    assert found.notes == ()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), clock=st.sampled_from([0.0, 1.7e15]))
def test_the_order_of_the_file_does_not_matter_where_times_differ(
    tmp_path_factory: pytest.TempPathFactory, seed: int, clock: float
) -> None:
    rows = [kernel(clock + 10.0 * i, 4.5, i + 1) for i in range(6)] + [
        launch(clock + 10.0 * i, i + 1) for i in range(6)
    ]
    paired = [half for row in rows for half in halves(row)]
    random.Random(seed).shuffle(paired)
    found = summarise(read(tmp_path_factory.mktemp("pairs") / "trace.json", paired))
    assert (found["kernels"], found["launches"], found["gpu_busy_us"]) == (6, 6, 27)


def test_a_half_without_its_other_is_skipped_and_counted(tmp_path: Path) -> None:
    lone = [halves(kernel(300.0, 5.0, 90))[0], halves(kernel(500.0, 5.0, 91, stream=8))[1]]
    found = read(tmp_path / "lone.json", [*two_steps(), *lone])
    assert [(note.code, note.count) for note in found.notes] == [("skipped-events", 2)]
    assert summarise(found)["kernels"] == 2


def test_a_pair_that_lies_in_two_halves_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_halves, "_num_cpus", lambda: 2)
    outer, *inner = [kernel(0.0, 9000.0, 1, stream=9), *(kernel(3.0 * i, 2.0, i + 2) for i in range(2900))]
    begin, end = halves(outer)
    path = tmp_path / "trace.json"
    whole = summarise(read(path, [begin, *inner, end]))
    assert (whole["kernels"], whole["gpu_busy_us"]) == (2901, 9000)
    monkeypatch.setattr(kineto, "read_events", partial(read_events, split_bytes=1))
    assert summarise(read_kineto(path)) == whole
