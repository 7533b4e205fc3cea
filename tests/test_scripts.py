"""The scripts choose their python in one way, and a set-up that fails or is killed neither stays nor is used.

Everything runs in a copy of scripts/ beside a link to the package, with the real pip and venv. The machine without a
network is played by pip's own settings: no index, no configuration file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IN_BASH = [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]
IN_BASH = [path for path in IN_BASH if path.is_file() and path.read_text().startswith("#!/usr/bin/env bash")]
# A project that pip installs without an index: its backend is in the tree and its wheel holds its needs alone.
LITTLE = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
dependencies = []
"""
BACKEND = """
import os, pathlib, time, tomllib, zipfile

WHEEL = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"

def build_editable(folder, config_settings=None, metadata_directory=None):
    if os.path.exists("slow"):
        pathlib.Path("begun").touch()
        time.sleep(600)
    needs = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]["dependencies"]
    lines = ["Metadata-Version: 2.1", "Name: perfdoctor", "Version: 0", *("Requires-Dist: " + need for need in needs)]
    with zipfile.ZipFile(os.path.join(folder, "perfdoctor-0-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("perfdoctor-0.dist-info/METADATA", "\\n".join(lines) + "\\n")
        wheel.writestr("perfdoctor-0.dist-info/WHEEL", WHEEL)
        wheel.writestr("perfdoctor-0.dist-info/RECORD", "")
    return "perfdoctor-0-py3-none-any.whl"

build_wheel = build_editable
"""
CASE = """import torch

weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(12):
    loss = (weight * weight).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
"""


class Checkout:
    """A copy with a PATH whose python3 is this python's base: no torch there, and no GPU to be seen."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "check out"
        self.venv = self.root / ".venv"
        self.own = self.venv / "bin" / "python"
        self.bin = folder / "bin"
        self.bin.mkdir()
        shutil.copytree(ROOT / "scripts", self.root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "constraints.txt", "README.md"):
            shutil.copy(ROOT / name, self.root)
        (self.root / "perfdoctor").symlink_to(ROOT / "perfdoctor")
        kept = {name: value for name, value in os.environ.items() if name != "PYTHON" and not name.startswith("PIP_")}
        self.environment = {
            **kept, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "",
            "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.put_python(f'unset PYTHONPATH\nexec "{getattr(sys, "_base_executable", sys.executable)}" "$@"')

    def put_python(self, body: str) -> None:
        path = self.bin / "python3"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def put_little_project(self) -> None:
        (self.root / "pyproject.toml").write_text(LITTLE)
        (self.root / "backend.py").write_text(BACKEND)

    def put_half_made_venv(self) -> None:
        venv.create(self.venv, symlinks=True)

    def start(self, script: str, *args: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "scripts" / script), *args], cwd=self.bin, env={**self.environment, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def call(self, script: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(script, *args, **environment)
        out, error = process.communicate(timeout=200)
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    def chosen(self, *args: str, **environment: str) -> str:
        done = self.call("choose_python", *args, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Set up once for all tests that begin with a finished .venv; each has a copy."""
    checkout = Checkout(tmp_path_factory.mktemp("finished"))
    checkout.put_little_project()
    done = checkout.call("setup", "minimal")
    assert done.returncode == 0, done.stderr
    return checkout


@pytest.fixture
def little(checkout: Checkout, finished: Checkout) -> Checkout:
    shutil.rmtree(checkout.root)
    shutil.copytree(finished.root, checkout.root, symlinks=True)
    return checkout


@pytest.mark.parametrize("command", [("bench", "parse", "--help"), ("try_cases_emulated", ".")], ids=lambda c: c[0])
def test_a_set_up_that_fails_leaves_nothing_and_names_the_next_move(
    checkout: Checkout, command: tuple[str, ...]
) -> None:
    done = checkout.call(*command)
    assert done.returncode == 2
    assert not checkout.venv.exists()
    what, next_move = done.stderr.splitlines()[-2:]
    assert what.startswith("scripts/setup: ")
    assert ".venv is removed again" in what
    assert "PYTHON=/path/to/python" in next_move
    assert "Traceback" not in done.stderr


def test_a_set_up_that_fails_leaves_a_venv_that_was_there_before(checkout: Checkout) -> None:
    checkout.put_half_made_venv()
    (checkout.venv / "mine").write_text("kept")
    done = checkout.call("perfdoctor", "--version")
    assert done.returncode == 2
    assert "scripts/setup: pip failed: ERROR: " in done.stderr.splitlines()[-2]
    assert (checkout.venv / "mine").read_text() == "kept"
    assert checkout.call("setup", "--finished", "minimal").returncode == 1


@pytest.mark.parametrize(
    "command",
    [("bench", "watching", "--help"), ("perfdoctor", "--version"), ("test", "--version"), ("try_cases", "--help")],
    ids=lambda c: c[0],
)
def test_a_half_made_venv_is_not_used(checkout: Checkout, command: tuple[str, ...]) -> None:
    checkout.put_half_made_venv()
    done = checkout.call(*command, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert not done.stderr.startswith("scripts/")


def test_cases_are_tried_in_the_python_that_is_named(checkout: Checkout) -> None:
    checkout.put_half_made_venv()
    case = checkout.root / "cases" / "s1"
    case.mkdir(parents=True)
    (case / "case.py").write_text(CASE)
    (case / "expected.json").write_text(json.dumps({"by_line": {"10": ["item"]}}))
    done = checkout.call("try_cases_emulated", str(case.parent), PYTHON=sys.executable)
    assert done.stdout == "ok   s1  \n0 failed\n", done.stderr


def test_a_finished_venv_is_used_and_made_once(little: Checkout) -> None:
    assert little.chosen("library") == str(little.own)
    again = little.call("setup", "minimal")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    # Less than what is asked for is not finished.
    assert little.call("setup", "--finished", "full").returncode == 1


def test_a_venv_of_another_version_is_not_finished(little: Checkout) -> None:
    (little.root / "pyproject.toml").write_text(LITTLE + "# changed\n")
    assert little.call("setup", "--finished", "minimal").returncode == 1
    assert little.chosen("library") == str(little.own)
    assert little.call("setup", "--finished", "minimal").returncode == 0


def test_a_change_that_cannot_be_installed_leaves_what_was_finished(little: Checkout) -> None:
    text = LITTLE.replace("dependencies = []", 'dependencies = ["not-here>=1"]')
    (little.root / "pyproject.toml").write_text(text)
    done = little.call("choose_python", "library")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "not-here>=1" in done.stderr.splitlines()[-2]
    (little.root / "pyproject.toml").write_text(LITTLE)
    assert little.chosen("library") == str(little.own)


@pytest.fixture
def begun(checkout: Checkout) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start a set-up that stands still within pip."""
    started: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        checkout.put_little_project()
        (checkout.root / "slow").touch()
        process = checkout.start("choose_python", "library")
        started.append(process)
        while not (checkout.root / "begun").exists():
            assert process.poll() is None
            time.sleep(0.05)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_an_interrupted_set_up_takes_its_venv_away(
    checkout: Checkout, begun: Callable[[], subprocess.Popen[str]]
) -> None:
    process = begun()
    assert checkout.own.exists()
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not checkout.venv.exists()


def test_what_a_killed_set_up_left_is_not_used_and_is_finished_later(
    checkout: Checkout, begun: Callable[[], subprocess.Popen[str]]
) -> None:
    process = begun()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert checkout.own.exists()
    assert checkout.chosen("library", PYTHON=sys.executable) == sys.executable
    (checkout.root / "slow").unlink()
    assert checkout.chosen("library") == str(checkout.own)
    assert checkout.call("setup", "--finished", "minimal").returncode == 0


def test_two_set_ups_at_once_are_one(checkout: Checkout) -> None:
    checkout.put_little_project()
    both = [checkout.start("choose_python", "library") for _ in range(2)]
    said = [process.communicate(timeout=200) for process in both]
    assert [out.strip() for out, _ in said] == [str(checkout.own)] * 2, said
    assert sorted("installing" in error for _, error in said) == [False, True]


def test_a_python_of_the_path_that_sees_a_gpu_comes_before_a_set_up(checkout: Checkout, tmp_path: Path) -> None:
    play_gpu(checkout, tmp_path)
    checkout.put_half_made_venv()
    assert checkout.chosen("bench") == sys.executable
    assert checkout.chosen("--gpu", "tests") == sys.executable


def test_a_finished_venv_comes_before_it_unless_it_must_see_a_gpu(little: Checkout, tmp_path: Path) -> None:
    play_gpu(little, tmp_path)
    assert little.chosen("library") == str(little.own)
    assert little.chosen("--gpu", "library") == sys.executable


def play_gpu(checkout: Checkout, folder: Path) -> None:
    """python3 is this python, but its torch says that it sees a GPU."""
    (folder / "site" / "torch").mkdir(parents=True)
    (folder / "site" / "torch" / "__init__.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: True)\n"
    )
    (folder / "site" / "torchmetrics.py").touch()  # the real one wants the real torch
    checkout.put_python(f'PYTHONPATH="{folder / "site"}:$PYTHONPATH" exec "{sys.executable}" "$@"')


@pytest.mark.gpu
def test_the_real_python_that_sees_a_gpu_is_chosen(checkout: Checkout) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    checkout.environment.pop("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        checkout.environment["CUDA_VISIBLE_DEVICES"] = visible
    checkout.put_python(f'exec "{sys.executable}" "$@"')
    checkout.put_half_made_venv()
    for asked in (("library",), ("bench",), ("--gpu", "bench")):
        assert checkout.chosen(*asked) == sys.executable


def test_where_none_sees_a_gpu_it_says_so(little: Checkout) -> None:
    done = little.call("choose_python", "--gpu", "library")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no python here sees a GPU" in done.stderr
    assert "PYTHON=/path/to/python names another" in done.stderr


def test_nothing_is_set_up_for_a_gpu_that_is_not_there(checkout: Checkout) -> None:
    if subprocess.run(["bash", "-c", "nvidia-smi"], capture_output=True, check=False).returncode == 0:
        pytest.skip("this machine has a GPU")
    done = checkout.call("gpu_test")
    assert (done.returncode, done.stdout) == (2, "")
    assert "nvidia-smi shows none" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not checkout.venv.exists()


def test_a_named_python_comes_first(little: Checkout) -> None:
    assert little.chosen("library", PYTHON=sys.executable) == sys.executable


def test_a_named_python_that_lacks_something_is_told_and_not_used(little: Checkout) -> None:
    little.put_python(f'unset PYTHONPATH\nexec "{little.own}" "$@"')
    done = little.call("choose_python", "library", PYTHON="python3")
    assert done.stdout.strip() == str(little.own)
    assert "PYTHON=python3 cannot import msgspec (No module named 'msgspec')" in done.stderr


@pytest.mark.parametrize("script", ["choose_python", "setup"])
def test_a_named_python_that_is_not_there_is_refused(checkout: Checkout, script: str) -> None:
    done = checkout.call(script, "library" if script == "choose_python" else "minimal", PYTHON="/not/here")
    assert done.returncode == 2
    assert "/not/here" in done.stderr
    assert not checkout.venv.exists()


@pytest.mark.parametrize("path", IN_BASH, ids=lambda path: path.name)
def test_bash_can_read_it(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_other_script_reaches_for_the_venv() -> None:
    named = {path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and ".venv" in path.read_text()}
    assert named == {"setup", "choose_python"}
