"""nsys as a process: where it is, what it knows, and running it to an end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from perfdoctor.doors.script import output_aside
from perfdoctor.errors import INTERRUPTED, UsageError

_FOLDERS = (
    "/opt/nvidia/nsight-systems/*/bin",
    "/opt/nvidia/nsight-systems-cli/*/bin",
    "/opt/nvidia/nsight-systems/*/target-linux-*",
    "/usr/local/cuda*/bin",
    "/usr/lib/nsight-systems/bin",
    "/usr/lib/*-linux-gnu/nsight-systems/target-linux-*",
)
_HELP_LIMIT_S = 60
_BEGIN_LIMIT_S = 120  # the script begins as soon as its Python runs
_EXPORT_LIMIT_S = 1800
_INTERRUPT_LIMIT_S = 120
_ONCE_S = 1.0  # `timeout -s INT` sends two at once: that is one wish
_PATIENCE_S = 3.0
# By the driver itself: device files are there without a GPU too, once a driver's library has been loaded.
_COUNT = """
import ctypes, os, sys
driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
count = ctypes.c_int()
sys.exit(driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0)
"""
MISSING = (
    "nsys (NVIDIA Nsight Systems) was not found on PATH, nor in /opt/nvidia or a CUDA toolkit. Install it: "
    "`apt-get install nsight-systems` from Debian's non-free component, or the package from "
    "https://developer.nvidia.com/nsight-systems. `perfdoctor run` needs none"
)


def find_nsys() -> str:
    """The path of nsys: that on PATH, else the newest in the folders where its installers put it.

    Raises:
        UsageError: there is none; the message says how to install it.
    """
    found = shutil.which("nsys")
    if found is not None:
        return found
    places = (Path("/").glob(pattern.removeprefix("/") + "/nsys") for pattern in _FOLDERS)
    programs = [path for found_there in places for path in sorted(found_there, reverse=True)]
    for path in programs:
        if os.access(path, os.X_OK):
            return str(path)
    raise UsageError(MISSING)


def read_help(nsys: str) -> str:
    """What `nsys profile --help` says; '' where it says nothing."""
    try:
        done = subprocess.run(
            (nsys, "profile", "--help"), capture_output=True, text=True, errors="replace", timeout=_HELP_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def cuda_is_there() -> bool:
    """Whether a program started from here would find a GPU. Asked in another process: nothing is initialised here."""
    try:
        done = subprocess.run((sys.executable, "-c", _COUNT), capture_output=True, timeout=_HELP_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a recording ended. `hung` where nsys had to be ended, after the script or before it began."""

    exit_code: int
    interrupted: bool = False
    hung: bool = False
    begun: bool = True  # whether the script was started


def run_nsys(
    words: Sequence[str],
    environment: dict[str, str],
    ended_at: Callable[[], float | None],
    limit_s: float,
    tell: Callable[[str], None] = lambda text: None,
    begun: Callable[[], bool] = lambda: True,
    begin_limit_s: float = _BEGIN_LIMIT_S,
) -> Ending:
    """Run the command to its end. `ended_at()` gives the Unix time at which the script ended, None while it runs.

    nsys gets `limit_s` after that: 2022.4 sometimes never ends. It gets `begin_limit_s` until `begun()`. Ctrl-C goes
    to the script and to nsys as well, which then writes what it has; pressed again it ends all of them. `tell` gets
    what there is to know meanwhile. What the script and nsys write to standard output goes to standard error: the
    report stands alone there.
    """
    with _interrupts() as asked, output_aside():
        process = subprocess.Popen(words, env=environment)
        begin_until = time.monotonic() + begin_limit_s
        told = False
        while True:
            with suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(timeout=1.0)
                return Ending(exit_code=exit_code, interrupted=bool(asked), begun=begun())
            if asked and not told and time.monotonic() - asked[0] > _PATIENCE_S:
                told = True
                tell(f"interrupted: waiting for process {process.pid} and its script; interrupt again to kill them")
            if asked and asked[-1] - asked[0] > _ONCE_S:
                return _ended(process, exit_code=INTERRUPTED, interrupted=True)
            if time.monotonic() > begin_until and not begun():
                return _ended(process, exit_code=1, interrupted=bool(asked), begun=False)
            ended = ended_at()
            allowed = _INTERRUPT_LIMIT_S if asked else limit_s
            if ended is not None and time.time() - ended > allowed:
                return _ended(process, exit_code=1, interrupted=bool(asked))


def _ended(process: subprocess.Popen[bytes], *, exit_code: int, interrupted: bool, begun: bool = True) -> Ending:
    _end_nsys(process.pid)
    process.wait()
    return Ending(exit_code=exit_code, interrupted=interrupted, hung=True, begun=begun)


@contextmanager
def _interrupts() -> Iterator[list[float]]:
    """The moments (monotonic, in s) at which SIGINT came, in place of a KeyboardInterrupt in the midst of waiting."""
    asked: list[float] = []
    ignored = signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None)  # a job in the background of a shell script
    if ignored or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(time.monotonic()))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _end_nsys(pid: int) -> None:
    """Kill nsys, what it started, and its agent, which has left the family and is known by its session's name."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_text().split("\0")
            if "--start-agent" in words and any(re.fullmatch(rf"--session-name=.*-{pid}", word) for word in words):
                end_tree(int(path.parent.name))
    end_tree(pid)


def end_tree(pid: int) -> None:
    """Kill a process of ours and what it started. It is stopped first: one whose child ends may start the next."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    for child in _children(pid):
        end_tree(child)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:
            continue
    return found


def export(nsys: str, report: Path, target: Path) -> str:
    """Export a report as SQLite; '' or what went wrong."""
    words = (nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={target}", str(report))
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=_EXPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no end within {_EXPORT_LIMIT_S} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0 and target.is_file():
        return ""
    return (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
