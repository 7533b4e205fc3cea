"""What torch.compile costs before it gives anything: time to the first compiled steps, and after how many it is back.

    scripts/bench compiled [--loops single_tensor,conv_resident] [--modes default,reduce-overhead] [--steps 20]

Loops of `bench/loops.py`. Of each mode: the host time of the first call, what compiling took in all (backward
included), then blocks of steps eager and compiled in turn in one process. `back after` is the number of steps whose
savings make up for the compilation. Compiled code of earlier runs is not found again: the cache starts empty.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import perfdoctor
from perfdoctor.bench.loops import LOOPS, block_ns, comma_separated
from perfdoctor.bench.measurement import Measurement
from perfdoctor.bench.result import conditions_line
from perfdoctor.treat.treatment import Loop

_SEED = 11
_FIRST_STEPS = 6  # compiled, warmed up and recorded within these, in every mode
_WARMUP = 2

_HEAD = f"{'loop':16} {'mode':16} {'first s':>10} {'compile s':>10} {'eager ms':>10} {'then ms':>10} {'back after':>14}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCost:
    """One loop in one mode."""

    loop: str
    mode: str
    first_call_s: float
    compile_s: float
    eager: Measurement
    compiled: Measurement

    @property
    def steps_to_break_even(self) -> float | None:
        """After how many steps the compilation is made up for; None where a step is not faster."""
        saved_ns = self.eager.median_ns - self.compiled.median_ns
        return self.compile_s * 1e9 / saved_ns if saved_ns > 0 else None

    def __str__(self) -> str:
        back = self.steps_to_break_even
        return (
            f"{self.loop:16} {self.mode:16} {self.first_call_s:10.1f} {self.compile_s:10.1f} "
            f"{self.eager.median_ns / 1e6:10.2f} {self.compiled.median_ns / 1e6:10.2f} "
            f"{'never' if back is None else f'{back:,.0f} steps':>14}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line a loop and mode."""
    options = _options(argv)
    unknown = [name for name in options.loops if name not in LOOPS]
    if unknown:
        print(f"unknown loops: {', '.join(unknown)}; there are {', '.join(LOOPS)}", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(conditions_line() + ("" if device.type == "cuda" else ": tiny loops, times mean nothing"))
    print(_HEAD)
    for loop in options.loops:
        for mode in options.modes:
            print(measure_cost(loop, mode, device, options.rounds, options.steps), flush=True)
            torch._dynamo.reset()
            gc.collect()
    return 0


def measure_cost(name: str, mode: str, device: torch.device, rounds: int, steps: int) -> CompileCost:
    """Compile the loop's model, then time blocks of both in turn: two loops of the same seed, one of them compiled."""
    eager, compiled = (_built(name, device) for _ in range(2))
    assert compiled.model is not None
    call = perfdoctor.compile_model(compiled.model, mode=mode)
    block_ns(compiled, steps=_FIRST_STEPS, warmup=_WARMUP)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            times[which].append(block_ns((eager, compiled)[which], steps=steps, warmup=_WARMUP))
    report = call.report()
    call.undo()
    return CompileCost(
        loop=name,
        mode=mode,
        first_call_s=report.first_call_s or 0.0,
        compile_s=report.compile_s,
        eager=Measurement(name="eager", times_ns=tuple(times[0])),
        compiled=Measurement(name=mode, times_ns=tuple(times[1])),
    )


def _built(name: str, device: torch.device) -> Loop:
    torch.manual_seed(_SEED)
    return LOOPS[name](device, device.type == "cpu")


def _options(argv: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="scripts/bench compiled", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loops", type=comma_separated, default=["single_tensor", "conv_resident"])
    parser.add_argument("--modes", type=comma_separated, default=["default", "reduce-overhead"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args(argv)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="perfdoctor-compiled-") as empty:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
        sys.exit(main())
