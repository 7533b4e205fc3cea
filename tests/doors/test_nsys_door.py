"""`perfdoctor nsys`, with the real nsys where there is one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfdoctor.cli.nsys import execute
from perfdoctor.cli.output import Outcome
from perfdoctor.diagnose import diagnose
from perfdoctor.doors import nsys_process
from perfdoctor.doors.nsys import Recording, _missing, _of_rank, _without_report
from perfdoctor.doors.nsys_command import Options, build_command, default_name, python_program
from perfdoctor.doors.nsys_process import export, find_nsys, run_nsys
from perfdoctor.errors import BrokenTraceError, NotATraceError, UsageError
from perfdoctor.record.capture import Capture, Columns, Environment, read_capture
from perfdoctor.record.load import load_capture
from perfdoctor.record.nsys_scrub import scrub_export
from perfdoctor.record.sites_file import Sites, join, read_sites

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("trace", "sample", "cpuctxsw", "cuda-graph-trace", "capture-range", "capture-range-end")
HELP = "".join(f"\t--{flag}=\n" for flag in FLAGS)
needs_nsys = pytest.mark.skipif(shutil.which("nsys") is None, reason="needs nsys (Nsight Systems) on PATH")

LOOP = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(4000, 64)), batch_size=16)
for number, (batch,) in enumerate(loader):
    print("step", number, flush=True)
    if number == int(sys.argv[1]):
        sys.exit(int(sys.argv[2]))
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def build(text: str, **options: object) -> str:
    words = text.split()
    command = build_command(words, Options(name=default_name(words), **options), "nsys", HELP)  # type: ignore[arg-type]
    return " ".join(command.words)


def ranges_of(path: Path) -> Counter[str]:
    """Names of the closed ranges of an export, 'step 3' as 'step'; fails where one is open."""
    database = sqlite3.connect(path)
    rows = database.execute(
        "SELECT COALESCE(e.text, s.value), e.end, e.start FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId "
        "WHERE e.eventType IN (59, 60, 70, 71)"
    ).fetchall()
    database.close()
    assert all(end is not None and end >= start for _, end, start in rows)
    return Counter(name.removesuffix(name.lstrip("abcdefghijklmnopqrstuvwxyz_")) for name, _, _ in rows)


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


RANGES = """
import threading
import perfdoctor

@perfdoctor.annotate("turn")
def turns():
    for number in range(3):
        yield number

@perfdoctor.annotate("raising")
def raising():
    raise ValueError

def suspended():
    with perfdoctor.annotate("held"):
        yield

def work():
    for _ in range(5):
        with perfdoctor.annotate("thread"), perfdoctor.annotate("inner"):
            pass

list(turns())
for _ in range(2):
    try:
        raising()
    except ValueError:
        pass
left = suspended()
next(left)
with perfdoctor.annotate("outside"):
    left.close()
threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@needs_nsys
def test_ranges_arrive_once_each_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    flags = ("--trace=nvtx,osrt", "--sample=none", "--cpuctxsw=none", "--output=ranges")
    for _ in range(3):  # nsys 2022.4 fails before it starts anything once in some 50 runs
        words = ["nsys", "profile", *flags, sys.executable, "-c", RANGES]
        done = subprocess.run(words, capture_output=True, timeout=120)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    assert export("nsys", Path("ranges.nsys-rep"), Path("ranges.sqlite")) == ""
    # Three turns and the one that ends the generator.
    expected = {"turn": 4, "raising": 2, "held": 1, "outside": 1, "thread": 15, "inner": 15}
    assert ranges_of(Path("ranges.sqlite")) == expected


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A whole run of the loop on the CPU, in an environment with a secret."""
    if shutil.which("nsys") is None:
        pytest.skip("needs nsys (Nsight Systems) on PATH")
    folder = tmp_path_factory.mktemp("nsys")
    (folder / "loop.py").write_text(LOOP)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SECRET_TOKEN", "hunter2")
        outcome = execute(["--warmup", "2", "--active", "4", "--", sys.executable, "loop.py", "-1", "0"])
    return folder, outcome


def test_a_full_run(recorded: tuple[Path, Outcome]) -> None:
    folder, outcome = recorded
    assert outcome.exit_code == 0
    assert "loop.py" in outcome.text
    assert "4 bare steps" in outcome.text
    assert {path.name for path in folder.iterdir()} == {
        "loop.py", "loop_nsys.nsys-rep", "loop_nsys.sqlite", "loop_nsys.sites.json",
    }  # fmt: skip
    found, sites = ranges_of(folder / "loop_nsys.sqlite"), read_sites(folder / "loop_nsys.sites.json")
    steps = len(sites.marks)
    assert steps >= 2 + 4 + 5
    # Every phase once a step; the step that the script was ended in has its range as well.
    assert {found[name] for name in ("backward", "optimizer", "zero_grad", "data")} == {steps}
    assert found["step"] == steps
    assert found["forward"] == steps - 1  # the model is known from the first update on


def test_the_clocks_agree(recorded: tuple[Path, Outcome]) -> None:
    folder, _ = recorded
    capture, sites = load_capture(folder / "loop_nsys.sqlite"), read_sites(folder / "loop_nsys.sites.json")
    assert capture.source == "nsys"
    assert capture.bare is not None
    assert len(capture.bare.step_ns) == 4
    data = [
        (start, end)
        for start, end, name in zip(capture.ranges.start_ns, capture.ranges.end_ns, capture.ranges.name, strict=True)
        if capture.text(int(name)) == "data"  # a range of nsys's only
    ]
    assert data
    # The loader's range lies wholly in its step, in every step that was kept: impossible with clocks a step apart.
    for start, stop in zip(capture.steps.start_ns, capture.steps.end_ns, strict=True):
        assert sum(start <= begin and end <= stop for begin, end in data) == 1
    assert sites.capture.steps.end_ns.tolist() == capture.steps.end_ns.tolist()


def test_secrets_are_named_and_scrubbed(recorded: tuple[Path, Outcome], tmp_path: Path) -> None:
    folder, outcome = recorded
    (warning,) = [message for message in outcome.messages if "environment variables" in message]
    assert "perfdoctor nsys --scrub loop_nsys.sqlite" in warning
    copy = tmp_path / "loop_nsys.sqlite"
    shutil.copy(folder / "loop_nsys.sqlite", copy)
    before = ranges_of(copy)
    assert b"hunter2" in copy.read_bytes()
    assert "rows" in execute(["--scrub", str(copy)]).text
    content = copy.read_bytes()
    assert b"hunter2" not in content
    assert b"SECRET_TOKEN" not in content
    assert b"PATH=" not in content
    assert ranges_of(copy) == before
    assert not any(note.code == "environment-variables" for note in load_capture(copy).notes)
    assert scrub_export(copy).num_rows == 0
    assert [path.name for path in tmp_path.iterdir()] == ["loop_nsys.sqlite"]


def test_only_exports_are_scrubbed(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(b"nothing")
    with pytest.raises(NotATraceError, match="nsys export"):
        scrub_export(path)
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE users (name TEXT)")
        database.execute("INSERT INTO users VALUES ('me')")
    database.close()
    before = path.read_bytes()
    with pytest.raises(NotATraceError, match="StringIds"):
        scrub_export(path)
    assert path.read_bytes() == before
    path.write_bytes(before[:1000] + b"\xff" * 3000)
    with pytest.raises((BrokenTraceError, NotATraceError)):
        scrub_export(path)
    assert [left.name for left in tmp_path.iterdir()] == ["x.sqlite"]


@needs_nsys
def test_a_script_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(LOOP)
    outcome = execute(["--name", "short", "--", sys.executable, "loop.py", "7", "5"])
    assert outcome.exit_code == 5
    assert any("exit code 5" in message for message in outcome.messages)
    assert read_sites(Path("short.sites.json")).exit_code == 5
    assert "only 7 of" in " ".join(outcome.text.split())


@needs_nsys
def test_a_script_that_changes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    Path("loop.py").write_text(f"import os; os.chdir('elsewhere')\n{LOOP}")
    outcome = execute(["--name", "moved", "--", sys.executable, "loop.py", "9", "0"])
    assert len(read_sites(Path("moved.sites.json")).marks) > 5
    assert list(Path("elsewhere").iterdir()) == []
    assert "only 9 of" in " ".join(outcome.text.split())


@needs_nsys
def test_a_process_that_dies_leaves_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(LOOP.replace("sys.exit(", "__import__('os')._exit("))
    outcome = execute(["--name", "dead", "--", sys.executable, "loop.py", "7", "5"])
    assert outcome.exit_code == 5
    assert any("left no dead.sites.json" in message for message in outcome.messages)
    assert "recorded steps" in outcome.text  # nsys's own


@needs_nsys
def test_a_loop_without_cuda_opens_no_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("perfdoctor.doors.nsys.cuda_is_there", lambda: True)  # a GPU that the loop leaves alone
    Path("loop.py").write_text(LOOP)
    outcome = execute(["--warmup", "2", "--active", "3", "--", sys.executable, "loop.py", "-1", "0"])
    assert outcome.exit_code == 0
    assert any("the window was never opened" in message and "--whole" in message for message in outcome.messages)
    assert "3 bare steps" in outcome.text


@needs_nsys
def test_a_command_that_is_no_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = "import nvtx\nfor i in range(3):\n    with nvtx.annotate(f'step {i}'):\n        pass\n"
    for _ in range(3):  # nsys 2022.4 fails before it starts anything once in some 50 runs
        outcome = execute(["--", "bash", "-c", f'touch begun; "{sys.executable}" -c "$0"; exit 4', script])
        if Path("begun").exists():
            break
    assert outcome.exit_code == 4
    assert "no Python script" in capsys.readouterr().err
    assert load_capture("bash_nsys.sqlite").steps.index.tolist() == [0, 1, 2]


@needs_nsys
def test_the_report_stands_alone_and_files_keep_to_the_umask(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("open('own.txt', 'w').close()\n" + LOOP)
    command = f'umask 027; exec "{sys.executable}" -m perfdoctor nsys --format json -- "{sys.executable}" loop.py -1 0'
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"].endswith("loop.py -1 0")  # and nothing else
    assert "step 9\n" in done.stderr  # what the script prints
    assert "Generat" in done.stderr  # what nsys prints
    # nsys starts the script with an umask of 0.
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    written = {name: mode for name, mode in modes.items() if name != "loop.py"}
    assert set(written) == {"own.txt", "loop_nsys.nsys-rep", "loop_nsys.sqlite", "loop_nsys.sites.json"}
    assert {name: f"{mode & 0o027:o}" for name, mode in written.items()} == dict.fromkeys(written, "0")
    assert modes["own.txt"] == modes["loop_nsys.sites.json"] == 0o640


def started_slow_loop(folder: Path) -> subprocess.Popen[str]:
    """`perfdoctor nsys` at step 9 of a loop of some 20 steps a second."""
    (folder / "loop.py").write_text(LOOP.replace("flush=True)", "flush=True); __import__('time').sleep(0.05)"))
    call = "import sys\nfrom perfdoctor.cli.nsys import execute\nsys.exit(execute(sys.argv[1:]).exit_code)"
    process = subprocess.Popen(
        [sys.executable, "-c", call, "--active", "50", "--", sys.executable, "loop.py", "-1", "0"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line == "step 9\n":
            break
    return process


@needs_nsys
@pytest.mark.parametrize("twice", [False, True], ids=["ctrl-c", "timeout"])
def test_interrupted(tmp_path: Path, twice: bool) -> None:
    process = started_slow_loop(tmp_path)
    if twice:  # as `timeout -s INT` does: its child, and at once the group that the child is in
        os.kill(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    # Interrupted after step 9 was begun, and before all 5 + 50 + 51 were done.
    assert 9 <= len(read_sites(tmp_path / "loop_nsys.sites.json").marks) < 106
    assert (tmp_path / "loop_nsys.sqlite").exists()


@needs_nsys
def test_interrupted_alone_it_says_what_it_waits_for(tmp_path: Path) -> None:
    process = started_slow_loop(tmp_path)
    assert process.stdout is not None
    os.kill(process.pid, signal.SIGINT)  # `kill -INT`: the script goes on
    for line in process.stdout:
        if "interrupt again to kill them" in line:
            break
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output


@needs_nsys
def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ranks.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ntorch.set_num_threads(1)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(100):\n"
        "    model(torch.randn(4, 8)).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
        "del model\ndist.destroy_process_group()\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    outcome = execute(["--warmup", "2", "--active", "4", "--", *launcher, "ranks.py"])
    assert outcome.exit_code == 0
    captures = [load_capture(f"ranks_nsys_{rank}.sqlite") for rank in range(2)]
    assert [capture.environment.rank for capture in captures] == [0, 1]
    assert "rank" in outcome.text


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
