"""A saved capture comes back as it was; a damaged, foreign or newer file is refused by name."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_rows import document, two_steps

from perfdoctor.errors import BrokenTraceError, CaptureError, NotATraceError, UnsupportedTraceError
from perfdoctor.record.capture import (
    Bare,
    Calls,
    Capture,
    Environment,
    Frame,
    Hits,
    Note,
    Overhead,
    Phase,
    Site,
    read_capture,
)
from perfdoctor.record.load import load_capture

ANY = st.integers(-(2**63), 2**63 - 1)


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    """A capture that uses every part: read from a trace, with what a live session adds."""
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(document(two_steps())))
    recorded = load_capture(trace)
    site = Site(
        frame=Frame(file="train.py", line=12, function="step"),
        library=Frame(file="torch/_tensor.py", line=1, function="__format__", owner="torch"),
        text="loss.item()",
    )
    bare = Bare(
        step_ns=np.array([5, 6]), data_ns=np.array([1, 2]), samples=np.array([8, -1]), micro_batches=np.array([1, 1])
    )
    return replace(
        recorded,
        sites=(site, Site(frame=Frame(file="In[5]", line=3, function="<module>"), caller=site.frame, exact=False)),
        hits=Hits.from_rows([(1, 2, 3, 0, 0, -1, Phase.LIGHT)]),
        environment=Environment(gpu="GPU", rank=2, launch_blocking=False),
        notes=(Note(code="n", text="t\u00fc", count=4),),
        overheads=(Overhead(phase="light", ratio=0.1, low=0.05, high=0.2),),
        bare=bare,
        full=replace(recorded, source="torch.profiler"),
    )


def assert_equal(left: Capture, right: Capture) -> None:
    for table in Capture.TABLES:
        for name, values in getattr(left, table).columns().items():
            np.testing.assert_array_equal(values, getattr(getattr(right, table), name), err_msg=f"{table}.{name}")
    for name in ("source", "strings", "sites", "environment", "costs", "notes", "overheads"):
        assert getattr(left, name) == getattr(right, name)


def test_round_trip(tmp_path: Path, capture: Capture) -> None:
    path = tmp_path / "saved.zip"
    capture.save(path)
    found = load_capture(path)
    assert_equal(capture, found)
    assert found.path == str(path)
    assert capture.full is not None
    assert found.full is not None
    assert_equal(capture.full, found.full)
    assert capture.bare is not None
    assert found.bare is not None
    assert found.bare.samples.tolist() == [8, -1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved.zip", "trace.json"]


@settings(max_examples=25)
@given(st.lists(st.tuples(*[st.integers(-(2**61), 2**62 - 1)] * 2, ANY, st.integers(-1, 1), ANY, ANY), max_size=8))
def test_any_numbers_survive(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, ...]]) -> None:
    path = tmp_path_factory.mktemp("numbers") / "saved"
    before = Capture(source="session", calls=Calls.from_rows(rows), strings=("a", "b"))
    before.save(path)
    assert_equal(before, read_capture(path))


def test_failed_save_leaves_what_was_there(tmp_path: Path, capture: Capture) -> None:
    path = tmp_path / "saved.zip"
    path.write_text("the old one")
    broken = replace(capture, overheads=(Overhead(phase="light", ratio=float("nan"), low=0, high=0),))
    with pytest.raises(ValueError, match="JSON"):
        broken.save(path)
    assert path.read_text() == "the old one"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved.zip", "trace.json"]


def test_every_truncation_is_refused(tmp_path: Path, capture: Capture) -> None:
    path = tmp_path / "saved.zip"
    capture.save(path)
    whole = path.read_bytes()
    for keep in (1, 3, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(CaptureError, match=r"saved\.zip"):
            load_capture(path)


def test_flipped_bytes_are_refused_or_harmless(tmp_path: Path, capture: Capture) -> None:
    """Every member carries a checksum: no wrong number comes out."""
    path = tmp_path / "saved.zip"
    capture.save(path)
    whole = path.read_bytes()
    refused = 0
    for at in range(40, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            assert_equal(capture, load_capture(path))
        except CaptureError:
            refused += 1
    assert refused > 10


def test_foreign_and_newer_archives(tmp_path: Path, capture: Capture) -> None:
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    with pytest.raises(NotATraceError, match=r"model\.pt"):
        load_capture(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("perfdoctor_capture.json", json.dumps({"schema_version": 99}))
    with pytest.raises(UnsupportedTraceError, match="99"):
        load_capture(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("perfdoctor_capture.json", json.dumps({"schema_version": 1}))
    with pytest.raises(BrokenTraceError, match="damaged"):
        load_capture(path)


def saved_with(tmp_path: Path, **changed: bytes | str) -> Path:
    """A saved recording of a small trace, with some of its members replaced. `__` in a name stands for a dot."""
    source = tmp_path / "trace.json"
    source.write_text(json.dumps(document(two_steps())))
    load_capture(source).save(tmp_path / "saved")
    members = {name.replace("__", "."): content for name, content in changed.items()}
    with zipfile.ZipFile(tmp_path / "saved") as old, zipfile.ZipFile(tmp_path / "changed", "w") as new:
        for name in old.namelist():
            new.writestr(name, members.get(name, old.read(name)))
    return tmp_path / "changed"


def column(*values: Any, dtype: Any = np.int64) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(values, dtype))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("member", "content"),
    [
        ("work__name__npy", column(0, 10**6, -(10**6), 0)),
        ("ops__name__npy", column(0, -7)),
        ("ranges__name__npy", column(2**62, 0)),
        ("work__start_ns__npy", column(-(2**62), 0, 0, 0)),
        ("calls__end_ns__npy", column(2**62, 0, 0, 0, 0, 0)),
        ("work__name__npy", column(0.5, 1, 1, 1, dtype=float)),
        ("work__name__npy", column("a", "b", "c", "d", dtype="U1")),
        ("work__name__npy", column([0], [1], [1], [1])),
        ("work__name__npy", column(0, 1)),
        ("perfdoctor_capture__json", "[]"),
        ("perfdoctor_capture__json", "null"),
    ],
)
def test_tables_that_do_not_fit_together_are_damage(tmp_path: Path, member: str, content: bytes | str) -> None:
    with pytest.raises(BrokenTraceError, match="damaged perfdoctor capture"):
        read_capture(saved_with(tmp_path, **{member: content}))


@pytest.mark.parametrize("strings", [[], {}, "text", [1], [None], {"a": 1}, None])
def test_names_that_are_none_are_damage(tmp_path: Path, strings: object) -> None:
    path = saved_with(tmp_path)
    with zipfile.ZipFile(path) as archive:
        manifest = json.loads(archive.read("perfdoctor_capture.json"))
    changed = json.dumps({**manifest, "strings": strings})
    with pytest.raises(BrokenTraceError, match="damaged perfdoctor capture"):
        read_capture(saved_with(tmp_path, perfdoctor_capture__json=changed))
