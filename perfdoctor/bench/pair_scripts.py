"""A slow and a fixed script, and what the fix gives back: both run in one process, in turn, block by block.

One process to the next differs by up to 7 % on one machine, so the truth is measured inside one: each script runs in a
thread of its own, only one at a time, and hands over after a block of optimizer steps with the device drained. The
first steps of a block are not counted. Blocks go slow fixed slow ... slow, and each fixed block is held against the
mean of its two neighbours, so that a drift in a straight line cancels.

Blocks are short, because a host's speed wanders: twelve pairs of 250 ms gave 2.5 ms (1.5 to 4.2) for a loop of
norms and reads where whole runs give 5.4; as many seconds in shorter blocks hold more pairs.

In `slow.py` the guilty lines end in `# GUILTY: kind`; the comment is stripped before perfdoctor sees the script.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MARK = re.compile(r"[ \t]*# GUILTY:[^\n]*")
_RESULT = "\nperfdoctor-pair "
_MANY_STEPS = 100_000  # the scripts are stopped, they do not end
_EDGE, _WARMUP = 3, 12
_BLOCK_MS, _FEWEST, _MOST = 60.0, 4, 60
_SECONDS = 30.0
_FEWEST_PAIRS = 6
_CUT = 0.1  # of the differences, at each end: a hiccup of the host strikes one block, what comes regularly strikes many
_RUN = 4  # neighbouring pairs resemble each other: they are redrawn together


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the fix gives back, ms a step. `saved`: trimmed mean of paired differences; low and high: its 95 %."""

    slow: float
    fixed: float
    saved: float
    low: float
    high: float
    num_pairs: int
    num_steps: int  # counted in a block


def find_pairs(folders: Sequence[Path]) -> list[Path]:
    """Folders with slow.py and fixed.py: those named, and those in the folders named."""
    found = [folder for folder in folders if (folder / "slow.py").exists()]
    for folder in folders:
        found += sorted(path.parent for path in folder.glob("*/slow.py"))
    return [pair for pair in dict.fromkeys(found) if (pair / "fixed.py").exists()]


def guilty_lines(script: Path) -> set[int]:
    """The numbers of the marked lines."""
    return {i for i, line in enumerate(script.read_text().splitlines(), 1) if _MARK.search(line)}


def run_verb(verb: str, script: Path, steps: int, options: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON report of `perfdoctor VERB` on the script without its marks."""
    with tempfile.TemporaryDirectory() as folder:
        copy, out = Path(folder) / "slow.py", Path(folder) / "report.json"
        copy.write_text(_MARK.sub("", script.read_text()))
        command = [sys.executable, "-m", "perfdoctor", verb, "--format", "json", "-o", str(out), *options, str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(steps), cwd=folder)
        if not out.exists():
            raise RuntimeError(f"{script}: perfdoctor {verb} ended with {done.returncode}\n{done.stderr[-2000:]}")
        report: dict[str, Any] = json.loads(out.read_text())
        return report


def measure_truth(pair: Path, seconds: float = _SECONDS) -> Truth:
    """Run both scripts of a pair in a process of their own; `seconds` is how long the blocks may take."""
    command = [sys.executable, "-m", "perfdoctor.bench.pair_scripts", str(pair), "--seconds", f"{seconds:g}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(_MANY_STEPS))
    if _RESULT not in done.stdout:
        raise RuntimeError(f"{pair}: ended with {done.returncode}\n{done.stderr[-2000:]}")
    return Truth(**json.loads(done.stdout.rsplit(_RESULT, 1)[1]))


def environment(steps: int) -> dict[str, str]:
    """Of a child: how many steps the script makes, and where perfdoctor lies."""
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "STEPS": str(steps), "PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))}


class _Stop(BaseException):
    """Unwinds a script."""


class _Runner(threading.Thread):
    """One script in a thread: it runs only while it holds the baton, and gives it back after `steps` steps."""

    def __init__(self, script: Path, clock: Callable[[], Any]) -> None:
        super().__init__(daemon=True, name=script.stem)
        self.script, self.clock = script, clock
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.left = 0
        self.marks: list[Any] = []
        self.stopping = False
        self.error: BaseException | None = None

    def run(self) -> None:
        self.go.acquire()
        code = compile(self.script.read_text(), str(self.script), "exec")
        space = {"__name__": "__main__", "__file__": str(self.script)}
        try:
            exec(code, space)
            self.error = RuntimeError(f"{self.script} ended before it was stopped")
        except _Stop:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.done.release()

    def stepped(self) -> None:
        """At the end of an optimizer step, in this thread."""
        self.marks.append(self.clock())
        self.left -= 1
        if self.left > 0:
            return
        self.done.release()
        self.go.acquire()
        if self.stopping:
            raise _Stop

    def block(self, steps: int) -> list[Any]:
        """From the main thread: let the script make `steps` steps, and wait. The clock's marks at their ends."""
        self.left, self.marks = steps, []
        self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise self.error
        return self.marks

    def stop(self) -> None:
        self.stopping = True
        self.go.release()
        self.join(60)


def alternate(pair: Path, seconds: float) -> Truth:
    """Both scripts in this process, in turn, for so many seconds; six pairs at least."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    cuda = torch.cuda.is_available()
    clock = _event if cuda else time.perf_counter_ns
    runners = [_Runner(pair / name, clock) for name in ("slow.py", "fixed.py")]

    def stepped(*_: Any) -> None:
        current = threading.current_thread()
        if isinstance(current, _Runner):
            current.stepped()

    def timed(runner: _Runner, steps: int) -> float:
        marks = runner.block(_EDGE + 1 + steps)
        if cuda:
            torch.cuda.synchronize()
        return _ms(marks[_EDGE], marks[-1]) / steps

    hook = register_optimizer_step_post_hook(stepped)
    try:
        for runner in runners:
            runner.start()
        first = max(timed(runner, _WARMUP) for runner in runners)
        first = max(timed(runner, _FEWEST) for runner in runners) or first
        steps = min(max(round(_BLOCK_MS / first), _FEWEST), _MOST)
        slow, fixed = [timed(runners[0], steps)], list[float]()
        end = time.monotonic() + seconds
        while len(fixed) < _FEWEST_PAIRS or time.monotonic() < end:
            fixed.append(timed(runners[1], steps))
            slow.append(timed(runners[0], steps))
    finally:
        for runner in runners:
            if runner.is_alive():
                runner.stop()
        hook.remove()
    return truth_of(slow, fixed, steps)


def truth_of(slow: Sequence[float], fixed: Sequence[float], steps: int) -> Truth:
    """From the blocks' times, one slow block more than fixed ones: the trimmed mean of the differences.

    Its 95 % is a bootstrap's over runs of neighbouring pairs, drawn with a fixed seed.
    """
    before = np.array(slow)
    saved = (before[:-1] + before[1:]) / 2 - np.array(fixed)
    starts = np.random.default_rng(0).integers(0, len(saved), (4000, -(-len(saved) // _RUN)))
    at = (starts[:, :, None] + np.arange(_RUN)) % len(saved)
    drawn = _trimmed_mean(saved[at.reshape(len(at), -1)[:, : len(saved)]])
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Truth(
        slow=median(slow), fixed=median(fixed), saved=float(_trimmed_mean(saved[None])[0]), low=float(low),
        high=float(high), num_pairs=len(saved), num_steps=steps,
    )  # fmt: skip


def _trimmed_mean(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    ordered = np.sort(rows, axis=1)
    cut = round(_CUT * rows.shape[1])
    return np.asarray(ordered[:, cut : rows.shape[1] - cut].mean(axis=1), np.float64)


def _event() -> Any:
    import torch

    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _ms(first: Any, last: Any) -> float:
    return (last - first) / 1e6 if isinstance(first, int) else float(first.elapsed_time(last))


def main(argv: Sequence[str] | None = None) -> int:
    """Print what the fix of one pair gives back, as JSON: `scripts/bench pair_scripts FOLDER`."""
    from dataclasses import asdict

    parser = argparse.ArgumentParser(prog="scripts/bench pair_scripts")
    parser.add_argument("pair", type=Path)
    parser.add_argument("--seconds", type=float, default=_SECONDS)
    options = parser.parse_args(argv)
    os.environ.setdefault("STEPS", str(_MANY_STEPS))
    truth = alternate(options.pair, options.seconds)
    print(f"{_RESULT}{json.dumps(asdict(truth))}", flush=True)
    os._exit(0)  # threads and loaders of stopped scripts may still hold on
    return 0


if __name__ == "__main__":
    sys.exit(main())
