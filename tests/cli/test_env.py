"""`perfdoctor env`: what works here, and why what does not work does not."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from perfdoctor.cli import env, main
from perfdoctor.cli.causes import explain
from perfdoctor.cli.env import Row, State, look_around

ROOT = Path(__file__).parents[2]


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def rows_of(text: str) -> dict[str, str]:
    return {line[8:24].strip(): line[:8].strip() for line in text.splitlines()}


def test_quick_look_names_every_tool_and_leaves_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--quick"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["Python"] == "ok"
    assert {"GPU", "torch", "nvcc", "ninja", "host compiler", "nsys", "packages"} <= set(rows)


def test_json_has_the_same_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "env.json"
    assert main(["env", "--quick", "--format", "json", "-o", str(report)]) == 0
    document = json.loads(report.read_text())
    assert document["schema_version"] == 1
    assert {row["state"] for row in document["rows"]} <= {"ok", "absent", "failed"}
    assert document["rows"][0]["name"] == "Python"


def test_no_environment_variable_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERFDOCTOR_TEST_SECRET", "hunter2-from-the-environment")
    assert main(["env", "--quick", "--format", "json"]) == 0
    assert "hunter2-from-the-environment" not in "".join(capsys.readouterr())


def test_tools_on_path_are_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(
        tmp_path, "nvidia-smi", "echo 'NVIDIA A100, 570.1, 81920 MiB, 8.0'; echo 'NVIDIA A100, 570.1, 81920 MiB, 8.0'"
    )
    program(tmp_path, "nvcc", "echo 'Cuda compilation tools, release 12.8, V12.8.61'")
    program(tmp_path, "ninja", "echo 1.11; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    rows = {row.name: row for row in look_around(quick=True)}
    assert rows["GPU"].detail == "2 x NVIDIA A100, 81920 MiB, driver 570.1, compute capability 8.0"
    assert rows["nvcc"].detail.startswith("CUDA 12.8 (")
    assert rows["ninja"].state is State.FAILED


def test_nothing_on_path_is_absent_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = {row.name: row for row in look_around(quick=True)}
    for name in ("GPU", "nvcc", "ninja", "host compiler", "nsys"):
        assert rows[name].state is State.ABSENT
        assert rows[name].remedy


def test_a_driver_that_does_not_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    row = next(row for row in look_around(quick=True) if row.name == "GPU")
    assert row.state is State.FAILED
    assert "version mismatch" in row.detail
    assert row.remedy


def test_a_try_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(env, "_TRIES", tmp_path)
    monkeypatch.setattr(env, "TIME_LIMIT_S", 0.5)
    row = env._tried("slow", "slow")
    assert (row.state, row.detail) == (State.FAILED, "no answer within 0 s")


@pytest.mark.parametrize(
    ("script", "state", "detail"),
    [
        ("print('fine')", State.OK, "fine"),
        ("import sys\nprint('no GPU')\nsys.exit(77)", State.ABSENT, "no GPU"),
        ("raise RuntimeError('CUDA out of memory')", State.FAILED, "the GPU's memory is full"),
        ("raise RuntimeError('never seen')", State.FAILED, "RuntimeError: never seen"),
        ("import os\nos.abort()", State.FAILED, "it ended without a word"),
        ("raise ModuleNotFoundError(\"No module named 'torch'\")", State.ABSENT, "torch is not installed"),
    ],
)
def test_tries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, state: State, detail: str) -> None:
    (tmp_path / "one.py").write_text(script)
    monkeypatch.setattr(env, "_TRIES", tmp_path)
    row = env._tried("one", "one")
    assert (row.state, row.detail) == (state, detail)


def test_works_without_torch(tmp_path: Path) -> None:
    blocker = (
        "import sys\nsys.modules['torch'] = None\nfrom perfdoctor.cli import main\nsys.exit(main(['env', '--quick']))"
    )
    done = subprocess.run([sys.executable, "-c", blocker], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_compile_try_runs_here() -> None:
    pytest.importorskip("torch")
    row = env._tried("torch.compile", "compile")
    # Where there is no compiler the row says so; either way it is an answer.
    assert row.state is State.OK or row.remedy, row


@pytest.mark.gpu
def test_every_try_works_on_a_gpu_machine() -> None:
    rows = {row.name: row for row in look_around(quick=False)}
    for name in ("GPU", "torch", "Triton launch", "torch.compile"):
        assert rows[name].state is State.OK, rows[name]
    if rows["nvcc"].state is State.OK:
        assert rows["CUDA extension"].state is State.OK, rows["CUDA extension"]


def test_explanations_are_one_line_each() -> None:
    cause, remedy = explain("Traceback\n  gcc: fatal error: Python.h: No such file or directory\n")
    assert (cause, remedy) == ("Python's headers are missing", "install python3-dev (Debian) or python3-devel")
    assert explain("") == ("it ended without a word", "")
    assert "\n" not in "".join(explain("a\nb\n\n"))


def test_a_row_is_one_line() -> None:
    table = env._table([Row(name="nvcc", state=State.ABSENT, detail="not on PATH", remedy="install it")])
    assert table == f"absent  nvcc            not on PATH; install it{os.linesep if os.name == 'nt' else chr(10)}"
