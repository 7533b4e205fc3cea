"""`perfdoctor analyze` on a real, small recording: output, files, gate."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

import perfdoctor
from perfdoctor.cli import main
from perfdoctor.report.json import schema


def test_text_is_what_the_library_prints(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == f"{perfdoctor.analyze(trace)}\n"
    assert "10.0 ms" in out  # the step


def test_json_follows_the_schema(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "--format", "json", str(trace)]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, schema())
    assert document["verdict"]["step"]["median_ms"] == pytest.approx(10, rel=0.02)
    # Kernels of 1 and 2 ms and a copy of 2 us in every 10 ms; the first step's window may begin with its own work.
    assert 0.3 < document["verdict"]["gpu_busy_ratio"] < 0.35


@pytest.mark.parametrize(("form", "start"), [("text", "perfdoctor: "), ("json", "{"), ("html", "<!doctype html>")])
def test_output_file_is_whole_and_alone(
    trace: Path, tmp_path: Path, form: str, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.out"
    assert main(["analyze", str(trace), "--format", form, "-o", str(report)]) == 0
    assert report.read_text("utf-8").startswith(start)
    assert sorted(tmp_path.iterdir()) == sorted([trace, report])
    out, err = capsys.readouterr()
    assert out == ""
    assert str(report) in err


def test_output_folder_is_checked_before_the_work(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(trace), "-o", str(tmp_path / "no" / "report.txt")]) == 2
    assert "not there" in capsys.readouterr().err
    assert main(["analyze", str(trace), "-o", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_several_files_are_ranks(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(trace.read_bytes())
    assert main(["analyze", "--format", "json", str(trace), str(other)]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert {Path(row["path"]).name for row in ranks} == {"trace.json", "other.json"}


def test_library_refuses_no_files() -> None:
    with pytest.raises(perfdoctor.UsageError, match="no file"):
        perfdoctor.analyze()
