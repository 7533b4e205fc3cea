"""A script is ended whatever it catches: bare excepts at several levels, Ctrl-C, os._exit. Nothing is left of it."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perfdoctor.doors.script import ScriptOptions, as_main, execute_program, load_program, run_script
from perfdoctor.doors.script_stop import ScriptStop

ROOT = Path(__file__).parents[2]
LOOPS = {
    "one level": "while True:\n    try:\n        step()\n    except:\n        caught += 1\n",
    "on one line": "while True:\n    try: step()\n    except BaseException: continue\n",
    "three levels": (
        "while True:\n    try:\n        while True:\n            try:\n                while True:\n"
        "                    try:\n                        step()\n                    except:\n"
        "                        caught += 1\n"
        "            except BaseException:\n                caught += 1\n    except:\n        caught += 1\n"
    ),
    "several frames": (
        "def inner():\n    while True:\n        try:\n            step()\n        except:\n            pass\n"
        "def outer():\n    while True:\n        try:\n            inner()\n        except:\n            continue\n"
        "while True:\n    try:\n        outer()\n    except:\n        caught += 1\n"
    ),
    "a retry in the except": (
        "def go():\n    try:\n        step()\n    except:\n        step()\n"
        "while True:\n    try:\n        go()\n    except:\n        caught += 1\n"
    ),
    "a generator": (
        "def steps():\n    while True:\n        try:\n            step()\n        except:\n            pass\n"
        "        yield 1\n"
        "for _ in steps():\n    pass\n"
    ),
    "a finally that goes on": "while True:\n    try:\n        step()\n    finally:\n        continue\n",
    "suppress": "import contextlib\nwhile True:\n    with contextlib.suppress(BaseException):\n        step()\n",
    "a context manager of its own": (
        "class Quiet:\n    def __enter__(self):\n        pass\n    def __exit__(self, *error):\n        return True\n"
        "while True:\n    with Quiet():\n        step()\n"
    ),
}  # fmt: skip
_MANY = 100  # steps: far more than any of them needs


class Script:
    """A script on disk, run until `step()`, a name in it, has been called often enough."""

    def __init__(self, folder: Path, source: str, *, throw_away: bool = True) -> None:
        (folder / "train.py").write_text("import __main__\ncaught = 0\n" + source)
        self.program = load_program(str(folder / "train.py"), module=False)
        self.stop = ScriptStop(throw_away=throw_away)
        self.num_steps = 0
        self.main: dict[str, Any] = {}

    def run(self) -> tuple[int, bool]:
        with as_main(self.program, ()):
            self.main = vars(sys.modules["__main__"])
            self.main["step"] = self.step
            return self.stop.run(partial(execute_program, self.program))

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps > _MANY:  # no exception would end it
            os.abort()
        if self.num_steps > 3:
            self.stop()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """A job in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore:'continue' in a 'finally' block:SyntaxWarning")  # from Python 3.14 on
@pytest.mark.parametrize("loop", LOOPS)
def test_a_script_is_ended_whatever_it_catches(tmp_path: Path, loop: str) -> None:
    script = Script(tmp_path, "class Kept:\n    pass\nkept = Kept()\n" + LOOPS[loop])
    before = sys.gettrace()
    assert script.run() == (0, True)
    assert script.num_steps <= 10
    assert sys.exc_info() == (None, None, None)
    kept = weakref.ref(script.main["kept"])
    script.main.clear()
    gc.collect()
    assert kept() is None
    assert sys.gettrace() is before
    assert os._exit.__module__ == "posix"


def test_what_stands_in_finally_and_behind_with_runs(tmp_path: Path) -> None:
    source = (
        "from pathlib import Path\ndone = []\n"
        "class Noted:\n    def __enter__(self):\n        pass\n"
        "    def __exit__(self, *error):\n        done.append('with')\n"
        "try:\n    with Noted():\n        while True:\n            try:\n                step()\n"
        "            except:\n                caught += 1\n"
        "finally:\n    total = 1 + 1\n    done.append('finally')\n"
    )
    script = Script(tmp_path, source)
    assert script.run() == (0, True)
    assert script.main["done"] == ["with", "finally"]
    assert script.main["caught"] == 1  # the first time, as any script may; never again


def test_the_trace_function_of_a_debugger_is_back(tmp_path: Path) -> None:
    seen: list[str] = []

    def theirs(frame: Any, event: str, arg: Any) -> Any:
        seen.append(frame.f_code.co_name)
        return theirs

    script = Script(tmp_path, LOOPS["three levels"])
    before = sys.gettrace()
    sys.settrace(theirs)
    mine = sys._getframe()
    mine.f_trace = theirs
    try:
        assert script.run() == (0, True)
        assert sys.gettrace() is theirs
        assert mine.f_trace is theirs
    finally:
        sys.settrace(before)
    assert "step" in seen


def test_a_loop_in_a_thread_ends_and_the_main_thread_is_not_traced(tmp_path: Path) -> None:
    thread = (
        "import threading\nworker = threading.Thread(target=train)\nworker.start()\nworker.join()\nafter = 'main'\n"
    )
    body = "".join(f"    {line}\n" for line in LOOPS["one level"].splitlines())
    script = Script(tmp_path, f"def train():\n    global caught\n{body}{thread}")
    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        assert script.run() == (0, False)
    finally:
        threading.excepthook = hook
    assert script.main["after"] == "main"
    assert script.num_steps <= 10


def test_a_script_that_steps_no_more_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfdoctor.doors.script_stop._GRACE_S", 0.05)
    source = (
        "import time\ntry:\n    for _ in range(9):\n        step()\nexcept:\n    caught += 1\n"
        "for _ in range(1000):\n    try:\n        time.sleep(0.1)\n    except:\n        caught += 1\n"
    )
    script = Script(tmp_path, source)
    assert script.run() == (0, True)
    assert script.num_steps == 4
    assert script.main["caught"] <= 2


MADE_OF_IT = {
    "sys.exit": "import sys\ntry:\n    while True: step()\nexcept BaseException:\n    sys.exit(1)\n",
    "os._exit": "import os\ntry:\n    while True: step()\nexcept BaseException:\n    os._exit(1)\n",
    "another": "try:\n    while True: step()\nexcept BaseException as e:\n    raise RuntimeError('failed') from e\n",
    "a group": (
        "import asyncio\nasync def train():\n    while True:\n        step()\n        await asyncio.sleep(0)\n"
        "async def main():\n    async with asyncio.TaskGroup() as tasks:\n        tasks.create_task(train())\n"
        "asyncio.run(main())\n"
    ),
}


@pytest.mark.parametrize("loop", MADE_OF_IT)
def test_what_a_script_makes_of_its_stop_is_no_failure(
    tmp_path: Path, loop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(tmp_path, MADE_OF_IT[loop])
    assert script.run() == (0, True)
    assert script.num_steps == 4
    assert capsys.readouterr().err == ""


def test_its_own_failure_before_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Script(tmp_path, "step()\nraise RuntimeError('its own')\n").run() == (1, False)
    assert capsys.readouterr().err.endswith("RuntimeError: its own\n")


def test_a_function_that_stands_in_an_except_is_no_part_of_it(tmp_path: Path) -> None:
    source = (
        "try:\n    import not_here\nexcept ImportError:\n    def train():\n        try:\n            while True:\n"
        "                try:\n                    step()\n                except:\n                    caught += 1\n"
        "        finally:\n            global saved\n            saved = True\n"
        "train()\n"
    )
    script = Script(tmp_path, source.replace("caught += 1", "pass"))
    assert script.run() == (0, True)
    assert script.main["saved"]


CAUGHT = """
import signal
for number in range(50):
    try:
        step()
        if number == 1:
            signal.raise_signal(signal.SIGINT)
    except:
        caught += 1
"""


@pytest.mark.usefixtures("ctrl_c")
def test_a_keyboard_interrupt_that_is_caught_is_known(tmp_path: Path) -> None:
    script = Script(tmp_path, CAUGHT)
    script.step = script.stop.check  # type: ignore[method-assign]
    assert script.run() == (130, False)
    assert script.stop.interrupted
    assert script.main["caught"] == 1


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("times", "code", "calls"), [(1, (0, False), 1), (2, (130, False), 1)])
def test_a_handler_of_the_scripts_gets_the_first_ctrl_c(
    tmp_path: Path, times: int, code: tuple[int, bool], calls: int
) -> None:
    source = (
        "import signal\ncalls = []\ndef mine(number, frame):\n    calls.append(number)\n"
        "before = signal.signal(signalnum=signal.SIGINT, handler=mine)\n"
        "shown = signal.getsignal(signalnum=signal.SIGINT)\n"
        "while not calls or len(calls) < pressed:\n    signal.raise_signal(signal.SIGINT)\n    step()\n"
    )
    script = Script(tmp_path, f"pressed = {times}\n{source}")
    script.step = script.stop.check  # type: ignore[method-assign]
    assert script.run() == code
    assert len(script.main["calls"]) == calls
    assert script.main["before"] is signal.default_int_handler
    assert script.main["shown"] is script.main["mine"]


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("end", ["os._exit({0})", "try:\n    os._exit({0})\nexcept:\n    os._exit({0})"])
def test_os_exit_ends_the_script_and_not_the_process(tmp_path: Path, status: int, end: str) -> None:
    script = Script(tmp_path, "import os\n" + end.format(status) + "\ncaught = 'went on'\n")
    assert script.run() == (status, False)
    assert script.main["caught"] == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_as_ever(tmp_path: Path) -> None:
    script = Script(
        tmp_path, "import os\npid = os.fork()\nif not pid:\n    os._exit(5)\n_, status = os.waitpid(pid, 0)\n"
    )
    assert script.run() == (0, False)
    assert os.waitstatus_to_exitcode(script.main["status"]) == 5


LOOP = """
import os, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
number = 0
while {goes_on}:
    try:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        number += 1
    except:
        print("caught", flush=True)
"""


def test_perfdoctor_run_ends_a_loop_that_catches_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(goes_on="number < 3000"))
    run = run_script(str(tmp_path / "train.py"), (), ScriptOptions(warmup=1, active=3))
    assert run.stopped
    assert capsys.readouterr().out.count("caught") == 1


def _trial(folder: Path, source: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    own = [sys.executable, "-m", "perfdoctor", "trial", *words, "--warmup", "1", "--active", "3"]
    return subprocess.run(
        [*own, "--format", "json", "-o", "out.json", "train.py"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


_TREATED = ("--treat=tf32,set_to_none,gc_frozen",)  # the first does not fit: known after ten steps
ENDING = """
import atexit, gc, os, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
gc.set_threshold(200, 2, 2)
kept = [[[i] for i in range(100)] for _ in range(1000)]
for _ in range({steps}):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    rows = [[i] for i in range(1000)]
print("finished", flush=True)
{end}
"""


@pytest.mark.parametrize("treat", [_TREATED, ()])
def test_a_trial_ends_a_loop_that_catches_everything(tmp_path: Path, treat: tuple[str, ...]) -> None:
    done = _trial(tmp_path, LOOP.format(goes_on="True"), *treat, "--seconds", "6")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["verdicts" if treat else "findings"] is not None
    assert done.stdout.count("caught") == 1


@pytest.mark.parametrize("treat", [_TREATED, ()])
@pytest.mark.parametrize("end", ["os._exit({0})", "atexit.register(os._exit, {0})"])
def test_the_page_comes_where_the_script_leaves_by_os_exit(tmp_path: Path, treat: tuple[str, ...], end: str) -> None:
    done = _trial(tmp_path, ENDING.format(steps=60, end=end.format(0)), *treat, "--seconds", "60")
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout  # it came to its own end
    assert json.loads((tmp_path / "out.json").read_text())["verdicts" if treat else "findings"] is not None


def test_the_exit_code_given_to_os_exit_is_the_commands(tmp_path: Path) -> None:
    done = _trial(tmp_path, ENDING.format(steps=40, end="os._exit(7)"), *_TREATED, "--seconds", "60")
    assert done.returncode == 7
    reasons = {row["reason"] for row in json.loads((tmp_path / "out.json").read_text())["verdicts"]}
    assert "not tried: the script failed first (exit code 7)" in reasons
