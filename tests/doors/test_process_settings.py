"""What a script sets for its whole process is as before once its trial is over."""

from __future__ import annotations

import builtins
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from perfdoctor.doors.process_settings import kept_settings
from perfdoctor.doors.script import as_main, execute_program, load_program
from perfdoctor.trial.sandbox import Sandbox

SETS = {
    "streams": "import sys\nsys.stdout = open('out.txt', 'a')\nsys.stderr = open('err.txt', 'a')\nsys.stdin = None",
    "hooks": "import sys, threading\nsys.excepthook = print\nsys.displayhook = print\nthreading.excepthook = print",
    "built-ins": "import builtins\nbuiltins.print = lambda *a, **k: None\nbuiltins.profile = 1",
    "warnings": "import warnings\nwarnings.simplefilter('ignore')\nwarnings.showwarning = print",
    "logging": "import logging\nlogging.basicConfig(filename='log.txt', level=1, force=True)\nlogging.disable(50)",
    "signals": "import signal\nsignal.signal(signal.SIGINT, lambda *a: None)\nsignal.signal(signal.SIGTERM, print)",
    "collector": "import gc\ngc.disable()\ngc.set_threshold(1, 2, 3)\ngc.callbacks.append(lambda *a: None)",
    "process": "import os, sys\nos.umask(0o077)\nsys.setrecursionlimit(4321)\nos.environ['SET'] = '1'\nos.chdir('/')",
    "torch": (
        "import torch\ntorch.set_default_dtype(torch.float64)\ntorch.set_default_device('meta')\n"
        "torch.set_grad_enabled(False)\ntorch.set_float32_matmul_precision('medium')\n"
        "torch.use_deterministic_algorithms(True)\ntorch.autograd.set_detect_anomaly(True)\n"
        "torch.backends.cudnn.benchmark = True\ntorch.set_num_threads(torch.get_num_threads() + 1)"
    ),
    "modules": "import beside\nbeside.number += 1",
}


def _settings() -> dict[str, Any]:
    return {
        "sys": [getattr(sys, name) for name in ("stdin", "stdout", "stderr", "excepthook", "displayhook", "path")],
        "threads": threading.excepthook,
        "builtins": dict(vars(builtins)),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "logging": (list(logging.root.handlers), logging.root.level, logging.root.manager.disable),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "gc": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "process": (os.umask(os.umask(0o022)), sys.getrecursionlimit(), dict(os.environ), os.getcwd()),
        "torch": (
            torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.get_num_threads(),
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
            torch.is_anomaly_enabled(), torch.backends.cudnn.benchmark,
        ),
        "modules": "beside" in sys.modules,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # the script's
@pytest.mark.parametrize("end", ["", "raise RuntimeError('planned')", "raise KeyboardInterrupt", "raise SystemExit(3)"])
@pytest.mark.parametrize("what", SETS)
def test_everything_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, end: str) -> None:
    monkeypatch.chdir(tmp_path)
    os.umask(0o022)
    (tmp_path / "beside.py").write_text("number = 0")
    (tmp_path / "train.py").write_text(f"{SETS[what]}\n{end}\n")
    before = _settings()
    for _ in range(2):  # a module that is imported again starts anew
        program = load_program(str(tmp_path / "train.py"), module=False)
        with kept_settings(), Sandbox(), as_main(program, ()):
            execute_program(program)
            module = sys.modules.get("beside")
            assert module is None or module.number == 1
        assert _settings() == before


def _fail() -> None:
    with kept_settings():
        builtins.print = None  # type: ignore[assignment]
        sys.stdout = None  # type: ignore[assignment]
        raise RuntimeError("ours")


def test_an_error_of_ours_puts_all_back_too() -> None:
    before = _settings()
    with pytest.raises(RuntimeError, match="ours"):
        _fail()
    assert _settings() == before


@pytest.mark.parametrize("script", ["pass", "signal.alarm(5)", "signal.signal(signal.SIGALRM, print); signal.alarm(0)"])
@pytest.mark.parametrize("on_before", [False, True])
def test_an_alarm_of_ours_rings_when_it_would_have_and_one_of_the_scripts_never(
    tmp_path: Path, script: str, on_before: bool
) -> None:
    (tmp_path / "train.py").write_text(f"import signal\n{script}\n")
    test_runners = signal.setitimer(signal.ITIMER_REAL, 1000.0 if on_before else 0.0)
    try:
        program = load_program(str(tmp_path / "train.py"), module=False)
        with kept_settings(), as_main(program, ()):
            execute_program(program)
        left, interval = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *test_runners)
    assert interval == 0
    assert (900 < left < 1000) if on_before else left == 0


ONCE = """
import multiprocessing, torch
import torch.distributed as dist
multiprocessing.set_start_method("spawn")
torch.set_num_interop_threads(torch.get_num_interop_threads())
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
"""


def test_what_can_be_set_once_only_can_be_set_in_a_second_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "train.py").write_text(ONCE.format(port=port))
    before = multiprocessing.get_start_method(allow_none=True), torch.set_num_interop_threads
    for _ in range(2):
        program = load_program(str(tmp_path / "train.py"), module=False)
        with kept_settings(), as_main(program, ()):
            multiprocessing.set_start_method(None, force=True)  # as in a new process
            assert execute_program(program) == (0, False), capsys.readouterr().err
        assert not torch.distributed.is_initialized()
        assert (multiprocessing.get_start_method(allow_none=True), torch.set_num_interop_threads) == before


def test_a_process_group_of_ours_stays(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with kept_settings():
            pass
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()
