"""The format of a file is told by its content; what is no trace is refused with what to do."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trace_rows import document, two_steps

from perfdoctor.errors import BrokenTraceError, CaptureError, NotATraceError
from perfdoctor.record.load import load_capture
from perfdoctor.record.summary import summarise

TEXT = json.dumps(document(two_steps())).encode()


@pytest.mark.parametrize("name", ["trace.sqlite", "trace", "trace.txt", "trace.nsys-rep"])
@pytest.mark.parametrize("content", [TEXT, b"\xef\xbb\xbf" + TEXT, b"\n \t" + TEXT, gzip.compress(TEXT, mtime=0)])
def test_content_counts_and_not_the_name(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    capture = load_capture(str(path))
    assert summarise(capture)["gpu_busy_us"] == 64
    assert capture.path == str(path)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("text", [TEXT.decode(), json.dumps(two_steps()), json.dumps(document(two_steps() * 400))])
def test_wide_texts(tmp_path: Path, mark: str, encoding: str, text: str) -> None:
    """As Windows' shells write what they redirect. The longest spans chunks; a name holds letters of every width."""
    path = tmp_path / "trace.json"
    content = (mark + text.replace("gemm", "g\u00e9\u4e2d\U0001f600")).encode(encoding)
    for each in (content, gzip.compress(content, mtime=0)):
        path.write_bytes(each)
        capture = load_capture(path)
        assert summarise(capture)["gpu_busy_us"] == 64
        assert "g\u00e9\u4e2d\U0001f600" in capture.strings


def test_saved_capture_under_any_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(TEXT)
    load_capture(path).save(tmp_path / "saved.json")
    assert summarise(load_capture(tmp_path / "saved.json"))["steps"] == 2


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b"", NotATraceError, "empty"),
        (b"step,loss\n1,0.5\n", NotATraceError, "Expected"),
        (b"\x80\x04\x95", NotATraceError, "Expected"),
        (gzip.compress(b"", mtime=0), NotATraceError, "empty gzip"),
        (gzip.compress(b"step,loss", mtime=0), NotATraceError, "no JSON"),
        (gzip.compress(gzip.compress(TEXT, mtime=0), mtime=0), NotATraceError, "Unpack it once"),
        (gzip.compress(b"SQLite format 3\0", mtime=0), NotATraceError, "gunzip"),
        (b"\x1f\x8b" + b"\xff" * 40, BrokenTraceError, "gzip"),
        (b"{}", NotATraceError, "traceEvents"),
        (b'{"traceEvents": {}}', NotATraceError, "traceEvents"),
        (b"SQLite format 3\0", BrokenTraceError, "cut off"),
    ],
)
def test_wrong_files(tmp_path: Path, content: bytes, error: type[CaptureError], words: str) -> None:
    path = tmp_path / "some.file"
    path.write_bytes(content)
    with pytest.raises(error, match=words) as caught:
        load_capture(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_progress_rises_to_the_whole(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "trace.json"
    text = json.dumps(document(two_steps() * 2000)).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    seen: list[float] = []
    load_capture(path, progress=seen.append)
    assert len(seen) >= 4
    assert seen == sorted(seen)
    assert 0.9 < seen[-1] <= 1.0


def test_empty_list_of_events_is_a_trace_that_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for content in ("[]", '{"traceEvents": []}', '{"traceEvents": [\n]}'):
        path.write_text(content)
        capture = load_capture(path)
        assert {note.code for note in capture.notes} == {"no-device-rows", "no-steps"}


@pytest.mark.parametrize("content", ["[1, 2, 3]", '{"traceEvents": [{"ph": "X", "na', '{"traceEvents": [[[['])
def test_a_list_without_one_event_is_no_trace(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(NotATraceError, match="no trace event"):
        load_capture(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(NotATraceError, match="pipe"):
        load_capture(tmp_path / "pipe.json")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="nothing-here"):
        load_capture(tmp_path / "nothing-here")
    with pytest.raises(CaptureError, match="folder"):
        load_capture(tmp_path)


def test_report_without_nsys_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "run.nsys-rep"
    path.write_bytes(b"NVIDIA Tegra Profiler\0 and more")
    with pytest.raises(NotATraceError, match="nsys export --type=sqlite"):
        load_capture(path)


def test_report_is_exported_where_nsys_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nsys writes the database that it is asked for; nothing is left behind."""
    tools = tmp_path / "bin"
    tools.mkdir()
    fake = tools / "nsys"
    fake.write_text(
        f"#!{sys.executable}\nimport sqlite3, sys\n"
        "target = next(a.split('=', 1)[1] for a in sys.argv if a.startswith('--output='))\n"
        "with open(sys.argv[-1], 'rb') as report:\n    broken = b'broken' in report.read()\n"
        "if broken:\n    sys.exit('report is damaged')\n"
        "with sqlite3.connect(target) as database:\n"
        "    database.execute('CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT)')\n"
        "    database.execute(\"INSERT INTO NVTX_EVENTS VALUES (5, 9, 59, 'step 1')\")\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    path = tmp_path / "run.nsys-rep"
    path.write_bytes(b"NVIDIA Tegra Profiler\0")
    capture = load_capture(path)
    assert capture.steps.index.tolist() == [1]
    assert capture.path == str(path)
    path.write_bytes(b"NVIDIA Tegra Profiler\0 broken")
    with pytest.raises(BrokenTraceError, match="report is damaged"):
        load_capture(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bin", "run.nsys-rep"]


def test_reading_imports_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(TEXT)
    code = f"import sys; from perfdoctor.record.load import load_capture; load_capture({str(path)!r}); sys.exit('torch' in sys.modules)"  # noqa: E501
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
