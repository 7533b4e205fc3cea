"""SIGTERM at the worst moments of a watched script: over a fork, in its forked child, for the whole process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from perfdoctor.cli.termination import ended_with_a_report

ROOT = Path(__file__).parents[2]
LOOP = """
import torch
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
def step():
    optimizer.zero_grad(); layer(torch.ones(2, 4)).sum().backward(); optimizer.step()
for _ in range(8):
    step()
"""


def _start(tmp_path: Path, script: str, before: str = "") -> subprocess.Popen[str]:
    (tmp_path / "train.py").write_text(script)
    code = f"import os, signal, sys\n{before}\nfrom perfdoctor.cli import main\nsys.exit(main(['run', 'train.py']))"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_signal_in_the_middle_of_a_fork_is_not_lost(tmp_path: Path) -> None:
    """Functions before a fork run in the reverse order of their registration: this one while the signal is held."""
    arm = "os.register_at_fork(before=lambda: os.path.exists('armed') and os.kill(os.getpid(), signal.SIGTERM))"
    script = LOOP + (
        "import os, time\n"
        "open('armed', 'w').close()\n"
        "if os.fork() == 0:\n    os._exit(0)\n"
        "print('forked', flush=True); time.sleep(30); print('went on')\n"
    )
    with _start(tmp_path, script, arm) as process:
        out, error = process.communicate(timeout=120)
    assert process.returncode == 143, error
    assert "perfdoctor: train.py" in out
    assert "forked" in out
    assert "went on" not in out
    assert "Exception ignored" not in error


def test_what_breaks_off_the_release_leaves_no_signal_blocked(tmp_path: Path) -> None:
    """Ctrl-C that comes during the fork is raised as the first function behind it begins."""
    arm = (
        "import _thread, functools\n"
        "os.register_at_fork(after_in_parent=functools.partial(_thread.interrupt_main, signal.SIGINT))"
    )
    script = LOOP + (
        "import os, signal\n"
        "if os.fork() == 0:\n    os._exit(0)\n"
        "print('blocked', signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)\n"
    )
    with _start(tmp_path, script, arm) as process:
        out, error = process.communicate(timeout=120)
    assert "blocked set()" in out, error


def test_a_forked_child_that_ends_as_its_parent_does_ends_well(tmp_path: Path) -> None:
    script = LOOP + (
        "import os, sys\n"
        "child = os.fork()\n"
        "if child == 0:\n    sys.exit(0)\n"
        "print('child', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
    )
    with _start(tmp_path, script) as process:
        out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert "child 0" in out, error


def test_a_signal_for_the_whole_group_ends_workers_too_and_the_report_comes(tmp_path: Path) -> None:
    """As `timeout` and batch systems send it; torch raises in the main thread over a worker that died of a signal."""
    script = LOOP + (
        "import time\n"
        "from torch.utils.data import DataLoader\n"
        "for batch in DataLoader(torch.ones(1000, 4), batch_size=1, num_workers=2):\n"
        "    step()\n"
        "    if _ == 7: print('ready', flush=True); _ = 0\n"
        "    time.sleep(1)\n"
    )
    with _start(tmp_path, script) as process:
        assert process.stdout is not None
        while "ready" not in process.stdout.readline():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGTERM)
        out, error = process.communicate(timeout=120)
    assert process.returncode == 143, error
    assert "perfdoctor: train.py" in out
    assert "DataLoader worker" not in error


@pytest.mark.parametrize("lasting", [False, True])
def test_all_is_as_before_on_every_way_out(lasting: bool) -> None:
    signals = (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT)
    before = [signal.getsignal(number) for number in signals]
    for error in (None, ValueError, KeyboardInterrupt, SystemExit):
        try:
            with ended_with_a_report(lasting=lasting):
                assert signal.getsignal(signal.SIGTERM) not in before
                if error is not None:
                    raise error
        except (ValueError, KeyboardInterrupt, SystemExit):
            pass
        assert [signal.getsignal(number) for number in signals] == before


def test_a_forked_child_has_the_default_and_nothing_blocked_whichever_thread_forks() -> None:
    masks: list[set[int]] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            own = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            os._exit(0 if own and not signal.pthread_sigmask(signal.SIG_BLOCK, ()) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        masks.append({int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())})

    with ended_with_a_report(lasting=False):
        fork()
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert masks == [set(), set()]
