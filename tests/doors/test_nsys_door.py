"""`perfdoctor nsys`, with the real nsys where there is one."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nsys_loop import LOOP

from perfdoctor.cli.nsys import execute
from perfdoctor.diagnose import diagnose
from perfdoctor.doors import nsys_process
from perfdoctor.doors.nsys import Recording, _missing, _of_rank, _without_report
from perfdoctor.doors.nsys_command import Options, build_command, default_name, python_program
from perfdoctor.doors.nsys_process import find_nsys, run_nsys
from perfdoctor.errors import UsageError
from perfdoctor.record.capture import Capture, Columns, Environment, read_capture
from perfdoctor.record.sites_file import Sites, join

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("trace", "sample", "cpuctxsw", "cuda-graph-trace", "capture-range", "capture-range-end")
HELP = "".join(f"\t--{flag}=\n" for flag in FLAGS)
needs_nsys = pytest.mark.skipif(shutil.which("nsys") is None, reason="needs nsys (Nsight Systems) on PATH")


def build(text: str, **options: object) -> str:
    words = text.split()
    command = build_command(words, Options(name=default_name(words), **options), "nsys", HELP)  # type: ignore[arg-type]
    return " ".join(command.words)


def test_a_script() -> None:
    assert build("python train.py --lr 1") == (
        "nsys profile --trace=cuda,nvtx,osrt --sample=none --cpuctxsw=none --cuda-graph-trace=node "
        "--capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true --output=train_nsys "
        "python -m perfdoctor.doors.nsys_child --sites train_nsys.sites.json --warmup 5 --active 10 -- train.py --lr 1"
    )


@pytest.mark.parametrize(
    ("text", "python", "target", "module", "arguments"),
    [
        ("python train.py -m x", ("python",), "train.py", False, ("-m", "x")),
        ("python3.12 -u -X dev -m pkg.train a", ("python3.12", "-u", "-X", "dev"), "pkg.train", True, ("a",)),
        ("/usr/bin/python3 -um pkg", ("/usr/bin/python3", "-u"), "pkg", True, ()),
        ("python -W error -mpkg -m q", ("python", "-W", "error"), "pkg", True, ("-m", "q")),
        ("pypy3 train.py", ("pypy3",), "train.py", False, ()),
    ],
)
def test_python_programs(text: str, python: tuple[str, ...], target: str, module: bool, arguments: object) -> None:
    program = python_program(text.split())
    assert program is not None
    assert (program.python, program.target, program.module, program.arguments) == (python, target, module, arguments)


@pytest.mark.parametrize(
    "text", ["python -c pass", "python -", "python", "bash train.sh", "python --version", "sleep 1"]
)
def test_no_python_program(text: str) -> None:
    assert python_program(text.split()) is None


def test_an_executable_script_of_python(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("#!/usr/bin/env python3.11\n")
    program = python_program([str(script), "a"])
    assert program is not None
    assert (program.python, program.target) == (("python3.11",), str(script))


def test_each_rank_has_its_own_nsys() -> None:
    built = build("torchrun --standalone --nproc-per-node 2 train.py --nproc-per-node 9")
    assert built.startswith("torchrun --standalone --nproc-per-node 2 --no-python nsys profile ")
    assert "--output=train_nsys_%q{RANK} " in built
    assert " --sites train_nsys_%q{RANK}.sites.json " in built
    assert built.endswith(" -- train.py --nproc-per-node 9")


def test_torchrun_as_a_module_and_of_a_module() -> None:
    built = build("python3 -m torch.distributed.run --nproc_per_node=2 -m pkg.train -m")
    assert built.startswith("python3 -m torch.distributed.run --nproc_per_node=2 --no-python nsys profile ")
    assert " python3 -u -m perfdoctor.doors.nsys_child " in built
    assert built.endswith(" --module -- pkg.train -m")
    assert build("torchrun --no-python --nproc-per-node 1 bash x.sh").endswith(" --output=bash_nsys_%q{RANK} bash x.sh")


def test_a_wrong_option_of_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="torchrun"):
        build("torchrun --no-such-thing train.py")
    assert "--no-such-thing" in capsys.readouterr().err


def test_only_what_this_nsys_knows() -> None:
    known = HELP.replace("--cuda-graph-trace=", "").replace("--capture-range-end=", "")
    command = build_command(["python", "train.py"], Options(name="n"), "nsys", known)
    assert not any(word.startswith(("--cuda-graph-trace", "--capture-range-end")) for word in command.words)
    assert len(command.remarks) == 2
    assert "--cuda-graph-trace" in command.remarks[0]


def test_without_a_gpu_the_whole_run() -> None:
    assert "--capture-range" not in build("python train.py", window=False)


def test_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nsys_process, "_FOLDERS", (f"{tmp_path}/*/bin",))
    with pytest.raises(UsageError, match=r"apt-get install nsight-systems.*developer\.nvidia\.com"):
        find_nsys()
    for year in ("2023.4", "2025.1"):
        (tmp_path / year / "bin").mkdir(parents=True)
        (tmp_path / year / "bin" / "nsys").touch(0o755)
    assert find_nsys() == str(tmp_path / "2025.1/bin/nsys")


@pytest.mark.parametrize("argv", [[], ["--"], ["--name", "no/where/x", "--", "python", "t.py"], ["--active", "0", "x"],
                                  ["--limit", "nan", "x"], ["--limit", "0", "x"]])  # fmt: skip
def test_wrong_use(argv: list[str]) -> None:
    with pytest.raises(UsageError):
        execute(argv)


@needs_nsys
def test_a_word_that_is_no_text() -> None:
    # nsys 2022.4 sends its command line as text and fails on other bytes.
    with pytest.raises(UsageError, match=r"tr\\udce9\.py"):
        execute(["--", sys.executable, os.fsdecode(b"tr\xe9.py")])


@needs_nsys
@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user who is not root: root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(0o555)
    with pytest.raises(UsageError, match="not writable"):
        execute(["--name", str(tmp_path / "shut" / "x"), "--", sys.executable, "loop.py"])


def test_only_the_recording_half_is_installed() -> None:
    left = Recording(name="out/run", report=None, unimported=Path("out/run.qdstrm"), sites=None)
    text = _without_report(left, Options(name="out/run"))
    assert "out/run.qdstrm" in text
    assert "ln -sfn" in text or ("QdstrmImporter -i run.qdstrm" in text and "perfdoctor analyze run.nsys-rep" in text)


def test_a_window_that_never_opened() -> None:
    left = Recording(name="run", report=None, unimported=None, sites=Path("run.sites.json"))
    # 3 of warm-up, 4 bare, 1 + 4 with hooks, 2 + 4 recorded.
    assert "18 steps" in _without_report(left, Options(name="run", warmup=3, active=4))


def test_an_nsys_that_never_ends(tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    parent = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True); {child}"
    )
    log = tmp_path / "pid"
    words = ["bash", "-c", f'exec "{sys.executable}" -c "$1" > "$2"', "bash", parent, str(log)]
    ending = run_nsys(
        words, dict(os.environ), lambda: time.time() - 5 if log.exists() and log.read_text() else None, 1.0
    )
    assert ending.hung
    stat = Path(f"/proc/{int(log.read_text())}/stat")
    deadline = time.monotonic() + 30
    while stat.exists() and stat.read_text().rsplit(")")[-1].split()[0] != "Z":  # dead, if nobody waits for it
        assert time.monotonic() < deadline, "what nsys started is still running"
        time.sleep(0.05)


def test_an_nsys_that_hangs_before_the_script_is_ended(tmp_path: Path) -> None:
    ending = run_nsys(
        [sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ), lambda: None, 60.0,
        begun=lambda: False, begin_limit_s=0.5,
    )  # fmt: skip
    assert (ending.hung, ending.begun, ending.interrupted) == (True, False, False)


# In place of nsys: fails `$FAILURES` times before it starts anything, then runs the command behind nsys's own words.
FAILING_NSYS = """#!/bin/bash
[ "$2" = --help ] && exit 0
echo tried >> tries
[ "$(wc -l < tries)" -gt "$FAILURES" ] || { echo "End of file" >&2; exit 1; }
shift
while [ "${1#-}" != "$1" ]; do shift; done
exec "$@"
"""


@pytest.mark.parametrize(("failures", "tries"), [(0, 1), (2, 3), (3, 3)])
def test_an_nsys_that_fails_before_the_script_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failures: int, tries: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bin").mkdir()
    Path("bin/nsys").write_text(FAILING_NSYS)
    Path("bin/nsys").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("FAILURES", str(failures))
    Path("loop.py").write_text(f"open('runs', 'a').write('run')\n{LOOP}")
    outcome = execute(["--warmup", "2", "--active", "3", "--", sys.executable, "loop.py", "7", "5"])
    assert Path("tries").read_text() == "tried\n" * tries
    said = capsys.readouterr().err
    assert said.count("nsys ended with exit code 1 before the script began: starting it again") == min(failures, 2)
    if failures < 3:
        assert outcome.exit_code == 5  # the script's own: once it has begun, nothing is started again
        assert Path("runs").read_text() == "run"
    else:
        assert outcome.exit_code == 1
        assert "the script never began: nsys ended before it" in outcome.messages
        assert not Path("runs").exists()


def test_ranks_are_told_by_their_files_and_those_without_any_are_named() -> None:
    known = Capture(source="nsys", environment=Environment(rank=2, world_size=4))
    silent = _of_rank(Capture(source="nsys"), "run/a b_%q{RANK}", "run/a b_13")
    assert silent.environment.rank == 13
    assert _of_rank(known, "x_%q{RANK}", "x_13") is known
    assert _of_rank(Capture(source="nsys"), "x", "x").environment.rank is None
    assert list(_missing([known, _of_rank(silent, "x", "x"), _of_rank(Capture(source=""), "%q{RANK}", "0")])) == [1, 3]
    assert _missing([]) == {}


def test_a_recording_of_a_gpu_taken_apart_and_joined_again() -> None:
    """A session's light recording on a GPU: its device tables as nsys would give them, the rest as a sites file."""
    whole = replace(read_capture(ROOT / "examples/slow_loop.perfdoctor"), full=None)
    shift = int(whole.calls.start_ns.min()) - 123  # nsys of 2022 may count from the start of the recording
    names = ("calls", "work", "ops", "stream_syncs", "steps")
    tables: dict[str, Any] = {name: _moved(getattr(whole, name), -shift) for name in names}
    recording = Capture(source="nsys", strings=whole.strings, **tables)
    emptied: dict[str, Any] = {name: type(getattr(whole, name)).empty() for name in names if name != "steps"}
    marks = dict(zip(whole.steps.index.tolist(), whole.steps.end_ns.tolist(), strict=True))
    joined = join(recording, Sites(capture=replace(whole, **emptied), marks=marks))
    assert set(joined.hits.thread.tolist()) <= set(joined.calls.thread.tolist())
    one, other = diagnose(joined), diagnose(whole)
    assert len(one.findings) >= 5
    assert one.findings == other.findings
    assert (one.step, one.accounting, one.leave_alone) == (other.step, other.accounting, other.leave_alone)


def _moved(table: Columns, by_ns: int) -> Columns:
    """On another clock, the threads with their process and machine above the number."""
    columns = {k: v + by_ns if k in ("start_ns", "end_ns") else v for k, v in table.columns().items()}
    if "thread" in columns:
        columns["thread"] = columns["thread"] | (5 << 40)
    return type(table)(**columns)
