"""What a throw-away script does at its very end, and after it: all of it while its files are still redirected."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from perfdoctor.doors.process_settings import kept_settings
from perfdoctor.doors.script import as_main, execute_program, load_program
from perfdoctor.doors.script_end import ended_inside
from perfdoctor.trial.sandbox import Sandbox

# Each writes late.txt when the last line of the script is behind it.
LATE = {
    "exit function": "import atexit\natexit.register(lambda: write())",
    "exit function by decorator": "import atexit\n@atexit.register\ndef last():\n    write()",
    "exit function with arguments": (
        "import atexit, pathlib\natexit.register(pathlib.Path('late.txt').write_text, data='late')"
    ),
    "finalizer": "import weakref\nclass Thing: pass\nthing = Thing()\nweakref.finalize(thing, write)",
    "thread": "import threading\nthreading.Thread(target=later).start()",
    "pool": "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(1).submit(later)",
    "several in a pool": (
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\n"
        "pool.submit(time.sleep, 0.1), pool.submit(time.sleep, 0.1), pool.submit(later)"
    ),
    "process": "import multiprocessing\nmultiprocessing.get_context('fork').Process(target=later).start()",
    "timer": "import threading\nthreading.Timer(0.1, write).start()",
}
WRITING = """
import time
def write():
    with open("late.txt", "w") as file:
        file.write("late")
def later():
    time.sleep(0.2)
    write()
"""
STREAM = """
import threading, time
def writing():
    number = 0
    while True:
        number += 1
        with open("live.txt", "a") as file:
            file.write(str(number))
        time.sleep(0.01)
threading.Thread(target=writing, daemon=True).start()
time.sleep(0.1)
"""


def _run(folder: Path, source: str) -> Sandbox:
    (folder / "train.py").write_text(source)
    program = load_program(str(folder / "train.py"), module=False)
    box = Sandbox()
    with kept_settings(), box, as_main(program, ()), ended_inside():
        execute_program(program)
    return box


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("way", LATE)
def test_what_is_written_at_the_end_is_thrown_away_too(folder: Path, way: str) -> None:
    box = _run(folder, WRITING + LATE[way])
    assert box.files == (str(folder / "late.txt"),)
    time.sleep(0.3)  # as long as any of them waits before it writes
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["train.py"]


@pytest.mark.filterwarnings("ignore:Exception in thread:pytest.PytestUnhandledThreadExceptionWarning")  # SystemExit
def test_a_thread_that_goes_on_writes_nothing_afterwards(folder: Path) -> None:
    box = _run(folder, STREAM)
    assert box.files == (str(folder / "live.txt"),)
    time.sleep(0.1)  # ten times as long as it sleeps between two writes
    assert not (folder / "live.txt").exists()
    (folder / "mine.txt").write_text("other threads write as ever")


def test_exit_functions_come_last_first_and_one_that_fails_keeps_none_back(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = """
import atexit, sys
def tell(text): print(text)
def gone(): print("gone")
def bad(): raise ValueError("in the exit function")
atexit.register(tell, "first")
atexit.register(gone)
atexit.register(bad)
atexit.register(sys.exit, 5)
atexit.register(tell, text="last")
atexit.unregister(gone)
print("script")
"""
    _run(folder, source)
    out, err = capfd.readouterr()
    assert out.split() == ["script", "last", "first"]
    assert "ValueError: in the exit function" in err


def test_a_script_that_fails_ends_as_well(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    box = _run(folder, WRITING + LATE["exit function"] + "\nraise RuntimeError('planned')")
    assert box.files == (str(folder / "late.txt"),)
    assert "RuntimeError: planned" in capfd.readouterr().err


def test_an_exit_function_that_leaves_the_process_ends_the_script_only(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = (
        "import atexit, os\natexit.register(print, 'never')\natexit.register(os._exit, 3)\n"
        "atexit.register(print, 'last')\n"
    )
    _run(folder, source)
    assert capfd.readouterr().out.split() == ["last"]
    assert os._exit.__module__ == "posix"
