"""`perfdoctor run`: an unmodified script in a process of its own, watched, stopped and reported."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import jsonschema
import pytest

from perfdoctor.cli.run import Command, _parser, for_rank, misplaced, split_command
from perfdoctor.report.json import schema

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import argparse, atexit
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--format", default="none")
parser.add_argument("--steps", type=int, default=100_000)
options = parser.parse_args()
atexit.register(print, "atexit ran")
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
total = 0.0
print("format", options.format)
try:
    for step in range(options.steps):
        loss = model(torch.ones(4, 8, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        {inside}
    print("ran to the end")
finally:
    print("finally ran")
"""
ITEM_LINE = 1 + SCRIPT.splitlines().index("        total += loss.item()")
WAITING = """\
import time, torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.randn(8)

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    for x in DataLoader(Slow(), batch_size=4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
QUICK = ("--warmup", "2", "--active", "3")


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "perfdoctor", "run", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def write(folder: Path, inside: str = "pass") -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(inside=inside))
    return path


def lines_found(document: dict) -> dict[int, str]:  # type: ignore[type-arg]
    rows = document["findings"] + document["leave_alone"]
    return {row["site"]["line"]: row["code"] for row in rows if row["site"] is not None}


def test_script_keeps_its_options_and_output_and_the_line_is_found(tmp_path: Path) -> None:
    script, report, saved = write(tmp_path), tmp_path / "report.json", tmp_path / "loop.perfdoctor"
    done = run(
        *QUICK,
        "--format",
        "json",
        "-o",
        str(report),
        "--save",
        str(saved),
        str(script),
        "--format",
        "mine",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    # Its own option came through, it was stopped before its end, and its clean-up ran.
    assert done.stdout.splitlines() == ["format mine", "finally ran", "atexit ran"]
    document = json.loads(report.read_text())
    jsonschema.validate(document, schema())
    assert lines_found(document)[ITEM_LINE] == "host-sync"
    analyzed = subprocess.run(
        [sys.executable, "-m", "perfdoctor", "analyze", "--format", "json", str(saved)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert analyzed.returncode == 0, analyzed.stderr
    assert lines_found(json.loads(analyzed.stdout)) == lines_found(document)


@pytest.mark.parametrize("form", ["json", "html"])
def test_a_report_for_a_program_stands_alone_on_standard_output(tmp_path: Path, form: str) -> None:
    loud = "import os, sys; os.system('echo child'); sys.__stdout__.write('by another name\\n'); print('printed')"
    done = run(*QUICK, "--format", form, str(write(tmp_path, loud)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if form == "json":
        jsonschema.validate(json.loads(done.stdout), schema())
    else:
        assert done.stdout.startswith("<!doctype html>")
        assert done.stdout.endswith("</html>\n")
    for text in ("format none", "child", "by another name", "printed", "finally ran", "atexit ran"):
        assert text in done.stderr


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="with a GPU no device is emulated")
def test_an_emulated_device_is_named_once(tmp_path: Path) -> None:
    done = run(*QUICK, "--format", "json", str(write(tmp_path)), cwd=tmp_path)
    (note,) = [note for note in json.loads(done.stdout)["notes"] if note["code"] == "emulated-device"]
    assert "times are those of the CPU" in note["text"]


def test_an_option_of_ours_behind_the_script_is_the_scripts_and_that_is_said(tmp_path: Path) -> None:
    script = write(tmp_path)
    done = run(*QUICK, str(script), "--keep-going", "--warmup", "9", cwd=tmp_path)
    assert done.returncode == 2  # the script's argparse does not know it
    order = f"perfdoctor run --warmup 2 --active 3 --keep-going --warmup 9 {script}"
    said = f"perfdoctor: --keep-going, --warmup behind {script}: the script's, not perfdoctor's"
    assert done.stderr.splitlines()[0] == said
    assert done.stderr.splitlines()[-1].endswith(order)  # again behind the script's own complaint


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("train.py --lr 1 --help", ""),
        ("train.py --format mine", "--format"),
        ("train.py --format=mine --save x", "--format, --save"),
        ("--save x -m train -o out", "-o"),
    ],
)
def test_options_behind_the_script_that_are_ours(argv: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    hint = misplaced(split_command(argv.split()), "run", _parser())
    assert hint.partition(" behind ")[0] == named
    told = capsys.readouterr().err
    assert told.startswith(f"perfdoctor: {named} behind ") if named else not told


def test_the_order_that_is_given_works_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--active", "3", "my dir/train it.py", "3", "a b", "-o", "my report.txt", "--gate=5", "--warmup", "3"]
    order = misplaced(split_command(words), "run", _parser()).partition("in front of it: ")[2]
    command = split_command(shlex.split(order)[2:])
    assert command.own == ("--active", "3", "-o", "my report.txt", "--gate=5", "--warmup", "3")
    assert (command.target, command.arguments) == ("my dir/train it.py", ("3", "a b"))
    assert _parser().parse_args(command.own).gate == 5


def test_a_script_that_was_stopped_is_said_to_be_and_its_command_is_told_again(tmp_path: Path) -> None:
    (tmp_path / "my dir").mkdir()
    write(tmp_path / "my dir")
    done = run(*QUICK, "my dir/train.py", "--format", "a b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ran to the end" not in done.stdout
    (said,) = [line for line in done.stderr.splitlines() if "stopped" in line]
    number = re.fullmatch(
        r"perfdoctor: stopped my dir/train.py after (\d+) steps, which is all that is watched .*", said
    )
    assert number is not None
    assert 2 + 3 + 3 <= int(number[1]) <= 100  # warm-up, bare and watched steps at least
    assert "--treat=log_every_n 'my dir/train.py' --format 'a b'\n" in done.stdout
    ended = run(*QUICK, "--keep-going", "my dir/train.py", "--steps", "30", cwd=tmp_path)
    assert "ran to the end" in ended.stdout
    assert "stopped" not in ended.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_script_that_is_told_to_end_is_reported_and_its_code_is_the_signals(
    tmp_path: Path, number: int, code: int
) -> None:
    inside = "if step == 12: print('ready', flush=True); import time; time.sleep(60)"
    write(tmp_path, inside)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "perfdoctor", "run", "train.py"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while "ready" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
    assert process.returncode == code, error
    assert "finally ran" in out
    assert "perfdoctor: train.py" in out  # the report of what was seen
    assert f"the script ended with exit code {code}" in error


def test_sigterm_is_the_scripts_and_its_workers_own(tmp_path: Path) -> None:
    """A handler of the script's is called; a worker that is terminated dies of the signal, as without perfdoctor."""
    (tmp_path / "train.py").write_text(
        "import multiprocessing, os, signal, time\n"
        "codes = set()\n"
        "for _ in range(40):  # at once: in the instant after the fork too\n"
        "    worker = multiprocessing.get_context('fork').Process(target=time.sleep, args=(30,))\n"
        "    worker.start(); worker.terminate(); worker.join(); codes.add(worker.exitcode)\n"
        "print('workers', codes)\n"
        "signal.signal(signal.SIGTERM, lambda *a: print('mine'))\n"
        "os.kill(os.getpid(), signal.SIGTERM); print('went on')\n"
    )
    done = run("train.py", cwd=tmp_path)
    assert done.stdout.splitlines()[:3] == ["workers {-15}", "mine", "went on"], done.stderr
    assert done.returncode == 0


def test_progress_of_a_slow_run_is_on_standard_error(tmp_path: Path) -> None:
    reader, writer = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "200"}
    slow = str(write(tmp_path, "import time; time.sleep(0.3)"))
    done = subprocess.run(
        [sys.executable, "-m", "perfdoctor", "run", *QUICK, slow],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=writer, text=True, timeout=300,
    )  # fmt: skip
    os.close(writer)
    read = b""
    with suppress(OSError):  # Linux: nobody is left to write
        while piece := os.read(reader, 65536):
            read += piece
    os.close(reader)
    error = read.decode()
    assert done.returncode == 0, error
    lines = [line for line in error.split("\r\x1b[K") if "watching" in line]
    assert lines
    for line in lines:
        assert re.match(r"perfdoctor: \d s, watching, .* \(phase \d of \d\), step \d+ of about \d+ $", line)
    assert "watching, " not in done.stdout


def test_module_runs_to_its_end_with_keep_going(tmp_path: Path) -> None:
    write(tmp_path)
    done = run(*QUICK, "--keep-going", "-m", "train", "--steps", "60", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ran to the end" in done.stdout
    assert f"train.py:{ITEM_LINE}" in done.stdout
    assert "Traceback" not in done.stderr


def test_exit_code_of_the_script_wins(tmp_path: Path) -> None:
    script = write(tmp_path, "if step == 1: raise SystemExit(7)")
    done = run(*QUICK, "--gate", "0", str(script), cwd=tmp_path)
    assert done.returncode == 7
    assert "finally ran" in done.stdout
    assert "exit code 7" in done.stderr


def test_error_of_the_script_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    script = write(tmp_path, "if step == 1: raise RuntimeError('of the script')")
    done = run(*QUICK, str(script), cwd=tmp_path)
    assert done.returncode == 1
    assert "RuntimeError: of the script" in done.stderr
    assert "perfdoctor/doors" not in done.stderr


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="with a GPU the gate can judge")
def test_gate_that_cannot_judge_does_not_pass(tmp_path: Path) -> None:
    done = run(*QUICK, "--gate", "5", str(write(tmp_path)), cwd=tmp_path)
    assert done.returncode == 2
    assert "--gate could not judge" in done.stderr


def test_under_torchrun_one_rank_speaks_and_each_writes_its_file(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "perfdoctor",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "run", *QUICK, "--save", "loop.perfdoctor", str(write(tmp_path))],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("perfdoctor: ") == 1
    assert sorted(path.name for path in tmp_path.glob("*.perfdoctor")) == ["loop.perfdoctor", "loop.rank1.perfdoctor"]


@pytest.mark.parametrize(
    ("path", "rank", "expected"), [("r.json", 0, "r.json"), ("", 3, ""), ("a/r.json", 2, "a/r.rank2.json")]
)
def test_files_of_ranks(path: str, rank: int, expected: str) -> None:
    assert for_rank(path, rank) == expected


@pytest.mark.parametrize("target", [("no_such.py",), ("-m", "no_such_module"), (".",)])
def test_no_such_script_is_one_line(tmp_path: Path, target: tuple[str, ...]) -> None:
    done = run(*target, cwd=tmp_path)
    assert done.returncode == 2
    complaints = [line for line in done.stderr.splitlines() if "no GPU here" not in line]
    assert len(complaints) == 1
    assert target[-1] in complaints[0]


@pytest.mark.parametrize(
    ("argv", "own", "target", "module", "arguments"),
    [
        ("train.py", "", "train.py", False, ""),
        ("train.py --warmup 3 -o x", "", "train.py", False, "--warmup 3 -o x"),
        ("--warmup 3 train.py --lr 1", "--warmup 3", "train.py", False, "--lr 1"),
        ("--warmup=3 --keep-going train.py", "--warmup=3 --keep-going", "train.py", False, ""),
        ("-o out.txt -m pkg.train --epochs 2 -m x", "-o out.txt", "pkg.train", True, "--epochs 2 -m x"),
        ("--keep-going -- -odd.py -- a", "--keep-going", "-odd.py", False, "-- a"),
        ("train.py -- --help", "", "train.py", False, "-- --help"),
        ("--help", "--help", "", False, ""),
        ("--warmup", "--warmup", "", False, ""),
        ("-m", "", "", True, ""),
    ],
)
def test_split(argv: str, own: str, target: str, module: bool, arguments: str) -> None:
    expected = Command(own=tuple(own.split()), target=target, module=module, arguments=tuple(arguments.split()))
    assert split_command(argv.split()) == expected


@pytest.mark.parametrize(("words", "typed"), [((), ""), (("--token", "secret"), " ARGS...")])
def test_a_saved_recording_prints_commands_with_the_name_of_its_script(
    tmp_path: Path, words: tuple[str, ...], typed: str
) -> None:
    (tmp_path / "runs").mkdir()
    script = tmp_path / "runs" / "train.py"
    script.write_text(WAITING)
    done = run(*QUICK, "--save", "loop.perfdoctor", str(script), *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = [sys.executable, "-m", "perfdoctor", "analyze", "loop.perfdoctor"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    page = subprocess.run(again, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60).stdout
    commands = [line for line in page.splitlines() if "perfdoctor trial --treat=" in line]
    assert commands, page
    assert all(line.endswith(f" runs/train.py{typed}") for line in commands)
    assert "SCRIPT.py" not in page
    assert "secret" not in page
