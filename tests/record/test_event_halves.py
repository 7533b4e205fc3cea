"""A file read by two processes gives what one process gives."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from trace_rows import document, kernel, launch, row

from perfdoctor.record import event_halves
from perfdoctor.record.event_halves import read_events
from perfdoctor.record.kineto import read_kineto


def large_trace(path: Path) -> None:
    """Several blocks; ops with call stacks, a damaged event in each half, names that only the second half has."""
    rows = []
    for i in range(3000):
        stack = f"train.py({i % 7}): step;train.py(90): main"
        rows += [
            row("cpu_op", f"aten::op{i // 100}", 10.0 * i, 4.0, **{"Call stack": stack}),
            launch(10.0 * i + 1, i + 1),
            kernel(10.0 * i + 3, 5.0, i + 1, name="k" * 200 + str(i % 5)),
        ]
    text = json.dumps(document(rows, baseTimeNanoseconds=1_000_000))
    for i in (10, 2900):
        text = text.replace(f'"ts": {10.0 * i + 1}', f'"bad": "\\q", "ts": {10.0 * i + 1}', 1)
    path.write_text(text)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_halves, "_num_cpus", lambda: 2)


@pytest.mark.usefixtures("two_cores")
def test_halves_equal_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    large_trace(path)
    assert event_halves._middle(path, 1) is not None
    _, whole_blocks, whole = read_events(path)
    _, split_blocks, split = read_events(path, split_bytes=1)
    assert split_blocks.tail == whole_blocks.tail
    assert (split.num_events, split.num_broken) == (whole.num_events, whole.num_broken)
    assert split.repairs.counts == whole.repairs.counts == {"escape": 2}
    assert split.strings.strings == whole.strings.strings
    np.testing.assert_equal(split.stacks.frames(), whole.stacks.frames())
    np.testing.assert_equal(split.finish(), whole.finish())


@pytest.mark.usefixtures("two_cores")
def test_second_process_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    large_trace(path)
    monkeypatch.setattr(event_halves.sys, "executable", "/bin/false")
    _, blocks, events = read_events(path, split_bytes=1)
    assert events.num_events + 1 == 9000
    assert b'"traceName"' in blocks.tail


def test_small_and_packed_files_are_read_by_one_process(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    large_trace(path)
    assert event_halves._middle(path, event_halves.SPLIT_BYTES) is None
    path.write_bytes(b"\x1f\x8b" + os.urandom(1000))
    assert event_halves._middle(path, 1) is None


def test_whole_file_through_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    large_trace(path)
    capture = read_kineto(path)
    assert (len(capture.ops), len(capture.calls), len(capture.work)) == (3000, 3000, 3000)
    assert capture.calls.start_ns[0] == 1_001_000
