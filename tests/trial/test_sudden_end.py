"""A process that ends at once leaves nothing: signals, `os._exit`, handlers of the script's own, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
import os, signal, sys, time
from perfdoctor.trial.sandbox import Sandbox
"""
BODY = """
with Sandbox() as box:
    open("checkpoint", "w").write("weights")
{setup}
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
"""
OWN_SAVES_AND_GOES_ON_DYING = """
    def ended(number, frame):
        open("last", "w").write("saved")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    signal.signal(signal.SIGTERM, ended)"""
OWN_CALLS_WHAT_WAS_THERE = """
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(number)
                           if signal.signal(number, before) else None)
    assert before == signal.SIG_DFL"""
OWN_EXITS = """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))"""
OWN_LEAVES_AT_ONCE = """
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(9))"""


def _start(folder: Path, code: str) -> subprocess.Popen[str]:
    (folder / "tmp").mkdir()
    (folder / "run.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "run.py"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _end(folder: Path, code: str, number: int | None) -> tuple[int, str]:
    """The exit status and what was said; the signal is sent once the process is ready."""
    process = _start(folder, code)
    try:
        if number is not None:
            assert process.stdout is not None
            assert "ready" in process.stdout.readline(), process.communicate()[1]
            process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert sorted(os.listdir(folder)) == ["run.py", "tmp"], said
    return process.returncode, said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_nobody_handles_deletes_the_files_and_ends_the_process(tmp_path: Path, number: int) -> None:
    code, _ = _end(tmp_path, HEAD + BODY.format(setup=""), number)
    assert code == -number  # 143, 129 in a shell
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize(
    ("setup", "code"),
    [
        (OWN_SAVES_AND_GOES_ON_DYING, -signal.SIGTERM),
        (OWN_CALLS_WHAT_WAS_THERE, -signal.SIGTERM),
        (OWN_EXITS, 7),
        (OWN_LEAVES_AT_ONCE, 9),
    ],
)
def test_a_handler_of_the_scripts_own_is_called_and_nothing_is_left(tmp_path: Path, setup: str, code: int) -> None:
    found, said = _end(tmp_path, HEAD + BODY.format(setup=setup), signal.SIGTERM)
    assert found == code, said
    assert os.listdir(tmp_path / "tmp") == []


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    setup = "    signal.signal(signal.SIGHUP, signal.SIG_IGN)\n    os.kill(os.getpid(), signal.SIGHUP)"
    code, said = _end(tmp_path, HEAD + BODY.format(setup=setup), signal.SIGTERM)
    assert code == -signal.SIGTERM, said
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize(
    ("end", "code"),
    [("os._exit(5)", 5), ("sys.exit(6)", 6), ("raise KeyError(1)", 1), ("os.kill(os.getpid(), signal.SIGINT)", -2)],
)
def test_other_ends(tmp_path: Path, end: str, code: int) -> None:
    found, said = _end(tmp_path, HEAD + BODY.format(setup=f"    {end}"), None)
    assert found == code, said
    assert os.listdir(tmp_path / "tmp") == []


def test_a_forked_worker_that_is_ended_takes_nothing_with_it(tmp_path: Path) -> None:
    code = """
with Sandbox() as box:
    open("checkpoint", "w").write("weights")
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
    leaver = os.fork()
    if leaver == 0:
        os._exit(3)
    time.sleep(0.2)
    os.kill(worker, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
    assert os.waitstatus_to_exitcode(os.waitpid(leaver, 0)[1]) == 3
    assert open("checkpoint").read() == "weights"
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and os._exit.__module__ == "posix"
"""
    found, said = _end(tmp_path, HEAD + code, None)
    assert found == 0, said


def test_a_forked_worker_ends_at_once_as_without_us(tmp_path: Path) -> None:
    """Before its first instruction, and in a long call of C, where a handler of Python's would not be called."""
    code = """
import multiprocessing
with Sandbox() as box:
    fork = multiprocessing.get_context("fork")
    for _ in range(20):
        worker = fork.Process(target=time.sleep, args=(60,))
        worker.start()
        worker.terminate()
        worker.join(20)
        assert worker.exitcode == -signal.SIGTERM, worker.exitcode
    worker = fork.Process(target=sum, args=(range(10**11),))
    worker.start()
    time.sleep(0.3)
    worker.terminate()
    worker.join(20)
    assert worker.exitcode == -signal.SIGTERM, worker.exitcode
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    if os.fork() == 0:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    os.kill(os.getpid(), signal.SIGTERM)
"""
    found, said = _end(tmp_path, HEAD + code, None)
    assert found == -signal.SIGTERM, said
    assert os.listdir(tmp_path / "tmp") == []


def test_blocks_in_each_other_each_clean_up_the_inner_one_first(tmp_path: Path) -> None:
    code = """
import signal, os
from perfdoctor.trial.sudden_end import cleaned_at_sudden_end
said = lambda text: lambda: os.write(2, text)
with cleaned_at_sudden_end(said(b"outer ")), cleaned_at_sudden_end(said(b"inner ")):
    with cleaned_at_sudden_end(said(b"over ")):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
"""
    found, said = _end(tmp_path, code, None)
    assert (found, said.split()) == (-signal.SIGTERM, ["inner", "outer"])


LOOP = """
import time, torch
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.randn(8)
model = torch.nn.Linear(8, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step, x in enumerate(torch.utils.data.DataLoader(Slow(), batch_size=2)):
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()
    if step == 70:
        torch.save(model.state_dict(), "checkpoint.pt")
        print("ready", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("treat", [(), ("--treat",)])
def test_a_trial_that_is_ended_leaves_nothing(tmp_path: Path, number: int, treat: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    (tmp_path / "tmp").mkdir()
    words = [sys.executable, "-m", "perfdoctor", "trial", *treat, "--seconds", "60", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
        time.sleep(0.3)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (-number if number == signal.SIGTERM else 130), said
    assert sorted(os.listdir(tmp_path)) == ["tmp", "train.py"]
    assert [name for name in os.listdir(tmp_path / "tmp") if "perfdoctor" in name or "pymp" in name] == []
