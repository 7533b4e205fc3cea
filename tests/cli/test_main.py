"""`main`: exit codes, one clear line for every wrong use, and no traceback for what the caller did."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from perfdoctor.cli import main

ROOT = Path(__file__).parents[2]


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error; nothing may be on standard output."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("perfdoctor: ")
    return err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["analyse", "x.json"], "analyse"),
        (["analyze"], "FILE"),
        (["analyze", "--frmat", "json", "x.json"], "--frmat"),
        (["analyze", "--format", "xml", "x.json"], "xml"),
        (["analyze", "--gate", "abc", "x.json"], "--gate"),
        (["analyze", "--gate", "140", "x.json"], "140"),
        (["env", "--no-such"], "--no-such"),
        (["run"], "script"),
        (["run", "--no-such", "x.py"], "--no-such"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert named in complaint(capsys)


def test_missing_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["analyze", str(tmp_path / "no.json")]) == 2
    line = complaint(capsys)
    assert "no.json" in line
    assert "No such file" in line


@pytest.mark.parametrize("content", [b"", b"hello", b"{}", b"\x7fELF", b"PK\x03\x04", b"\x1f\x8b"])
def test_files_that_are_no_recording_are_one_line(
    content: bytes, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, report = tmp_path / "wrong.json", tmp_path / "report.txt"
    path.write_bytes(content)
    assert main(["analyze", str(path), "-o", str(report)]) == 2
    assert "wrong.json" in complaint(capsys)
    assert sorted(tmp_path.iterdir()) == [path]


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "analyze" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert re.fullmatch(r"perfdoctor \d+\.\d+\.\d+\n", capsys.readouterr().out)
    for verb in ("run", "analyze", "env"):
        assert main([verb, "--help"]) == 0
        assert "--format" in capsys.readouterr().out


def test_python_dash_m(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perfdoctor", "analyze", str(tmp_path / "no.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_reader_that_stops_early_is_no_error(trace: Path) -> None:
    command = f"{sys.executable} -m perfdoctor analyze {trace} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("target", [">&-", "> /dev/full"])
def test_standard_output_that_takes_nothing_is_one_line(trace: Path, target: str) -> None:
    command = f'"{sys.executable}" -m perfdoctor analyze "{trace}" {target}'
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "standard output" in done.stderr


def test_a_python_without_the_dependencies_is_named(trace: Path) -> None:
    command = "import sys; sys.modules['msgspec'] = None; from perfdoctor.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", command, "analyze", str(trace)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "lacks the package msgspec" in done.stderr
