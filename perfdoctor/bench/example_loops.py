"""examples/slow_loop.py against examples/fast_loop.py, each run in a process of its own, in turn.

    scripts/bench example_loops [--steps 64] [--rounds 2] [--size large]

The order is slow fast fast slow, so that a machine that warms up favours neither. Steps are timed between optimizer
updates, on a GPU by CUDA events; the first of each run are left out, and the losses at the end are printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_ROOT = Path(__file__).resolve().parents[2]
_LOOPS = ("slow", "fast")
_WARMUP = 10
_RESULT = "perfdoctor-loop "
_LONGEST_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRun:
    """One run of one loop: ms of each counted step, the mean over all of them, and its last line."""

    name: str
    step_ms: tuple[float, ...]
    mean_ms: float
    last_line: str


def main(argv: Sequence[str] | None = None) -> int:
    """Print ms a step of both, with spread; 1 where a run failed."""
    options = _options(argv)
    if options.child:
        return _time_script(options.child, options.rest)
    from perfdoctor.bench.result import conditions_line

    print(conditions_line(), flush=True)
    runs: list[LoopRun] = []
    for number in range(max(options.rounds, 1)):
        for name in (*_LOOPS, *reversed(_LOOPS)):
            try:
                runs.append(run_loop(name, options.steps, options.rest))
            except RuntimeError as error:
                print(error, file=sys.stderr)
                return 1
            print(f"  round {number + 1}  {_line(name, runs[-1:])}  {runs[-1].last_line}", flush=True)
    by_name = {name: [run for run in runs if run.name == name] for name in _LOOPS}
    for name, own in by_name.items():
        print(_line(name, own))
    ratios = [s.mean_ms / f.mean_ms for s, f in zip(by_name["slow"], by_name["fast"], strict=True)]
    print(f"fast is {np.median(ratios):.2f}x as fast (runs {min(ratios):.2f} to {max(ratios):.2f}), by mean steps")
    return 0


def run_loop(name: str, steps: int, arguments: Sequence[str] = ()) -> LoopRun:
    """Run one loop in a process of its own.

    Raises:
        RuntimeError: it failed, with the end of what it said.
    """
    script = _ROOT / "examples" / f"{name}_loop.py"
    done = subprocess.run(
        [sys.executable, "-m", "perfdoctor.bench.example_loops", "--child", str(script), *arguments],
        capture_output=True, text=True, timeout=_LONGEST_S, cwd=_ROOT, check=False,
        env={**os.environ, "STEPS": str(steps), "PYTHONPATH": str(_ROOT)},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    found = next((line for line in lines if line.startswith(_RESULT)), None)
    if done.returncode or found is None:
        raise RuntimeError(f"{script.name} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    times: dict[str, Any] = json.loads(found.removeprefix(_RESULT))
    said = [line for line in lines if not line.startswith(_RESULT)]
    return LoopRun(
        name=name,
        step_ms=tuple(times["step_ms"]),
        mean_ms=times["mean_ms"],
        last_line=said[-1] if said else "",
    )


def _line(name: str, runs: Sequence[LoopRun]) -> str:
    steps = np.concatenate([run.step_ms for run in runs])
    low, mid, high = np.percentile(steps, (25, 50, 75))
    mean = np.mean([run.mean_ms for run in runs])
    return f"{name}: {mid:7.2f} ms a step ({low:.2f} to {high:.2f}), mean {mean:.2f}, {len(steps)} steps"


def _time_script(script: str, arguments: Sequence[str]) -> int:
    """In the child: run the script as `python` would, and print the times of its steps."""
    from perfdoctor.watch.clocks import Stamp, durations, elapsed_ns, stamp_now
    from perfdoctor.watch.steps import StepDetector

    stamps: list[Stamp] = []
    steps = StepDetector(stamp_now, stamps.append)
    steps.install()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    counted = stamps[_WARMUP:]
    if len(counted) < 2:
        print(f"{script}: {len(stamps)} steps, {_WARMUP + 2} are needed (--steps)", file=sys.stderr)
        return 2
    step_ns = durations(list(itertools.pairwise(counted)))
    mean_ns = elapsed_ns(counted[0], counted[-1]) / (len(counted) - 1)
    print(_RESULT + json.dumps({"step_ms": (step_ns / 1e6).tolist(), "mean_ms": mean_ns / 1e6}), flush=True)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench example_loops", description="slow_loop against fast_loop")
    parser.add_argument("--steps", type=int, default=64, help="of each run; one epoch has 64 (64)")
    parser.add_argument("--rounds", type=int, default=2, help="of slow fast fast slow (2)")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(argv)
    options.rest = rest  # the loops' own: --size small
    return options


if __name__ == "__main__":
    sys.exit(main())
