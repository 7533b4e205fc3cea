"""`perfdoctor nsys` with the real nsys: whole runs, recorded and reported, and ways in which they end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from nsys_loop import LOOP

from perfdoctor.cli.nsys import execute
from perfdoctor.cli.output import Outcome
from perfdoctor.doors.nsys_process import export
from perfdoctor.errors import BrokenTraceError, NotATraceError
from perfdoctor.record.load import load_capture
from perfdoctor.record.nsys_scrub import scrub_export
from perfdoctor.record.sites_file import read_sites

ROOT = Path(__file__).resolve().parents[2]
needs_nsys = pytest.mark.skipif(shutil.which("nsys") is None, reason="needs nsys (Nsight Systems) on PATH")


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
