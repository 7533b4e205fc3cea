"""Each treatment on the loops of `bench/loops.py` that it fits: before, after, ratio, parity of loss.

    scripts/bench treatments [--loops a,b] [--treatments a,b] [--rounds 5] [--steps 10] [--budget 140] [--all]

A treatment fits a loop that shows a finding it cures (or any, where it cures none by name); `--all` tries every pair.

Before and after are blocks of steps in turn, in one process, on the same live objects; the first steps of a block are
not counted (compilation, workers that start, a prefetcher that fills). The ratio is the median of the rounds' ratios,
with the lowest and the highest. Parity: the largest relative difference of the losses of two fresh loops with the same
seed, beside what the treatment claims and what two untreated runs differ by. A cell that cannot be says why.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from perfdoctor.bench.loops import LOOPS, SHOWS, block_ns, comma_separated
from perfdoctor.bench.measurement import Measurement
from perfdoctor.bench.result import conditions_line
from perfdoctor.errors import TreatmentRefused
from perfdoctor.treat.switches import TREATMENTS
from perfdoctor.treat.treatment import Loop, Treatment

_SEED = 11
_PARITY_STEPS = 6
_LONGEST_WHY = 200
_WARMUP = 4
Build = Callable[[torch.device, bool], Loop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One treatment on one loop. Times in ms a step; `why` is set where there are none."""

    loop: str
    treatment: str
    before_ms: float | None = None
    after_ms: float | None = None
    ratios: tuple[float, ...] = ()  # before / after, a round each
    loss_difference: float | None = None
    claimed: float = 0.0
    noise: float = 0.0  # the same difference between two untreated runs
    why: str = ""

    @property
    def within_claim(self) -> bool:
        """Whether losses differ no more than is claimed, or than untreated ones do."""
        return self.loss_difference is not None and self.loss_difference <= max(self.claimed, 2 * self.noise)

    def __str__(self) -> str:
        head = f"{self.loop:18} {self.treatment:24}"
        if self.why:
            return f"{head} {self.why}"
        assert self.loss_difference is not None
        ratio = f"{median(self.ratios):5.2f}x ({min(self.ratios):.2f}..{max(self.ratios):.2f})"
        parity = "same" if self.loss_difference == 0 else f"{self.loss_difference:.1e}"
        verdict = "" if self.within_claim else f"  MORE THAN CLAIMED ({self.claimed:.0e}, untreated {self.noise:.0e})"
        return f"{head} {self.before_ms:8.2f} {self.after_ms:8.2f}  {ratio:22} loss {parity}{verdict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure."""

    device: torch.device
    tiny: bool
    rounds: int
    steps: int
    until: float  # time.monotonic()
    everything: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line a cell; 1 where a treated loop's losses differ more than is claimed."""
    options = _options(argv)
    unknown = [name for name in options.loops if name not in LOOPS]
    names = [each.name for each in TREATMENTS]
    unknown += [name for name in options.treatments if name not in names]
    if unknown:
        print(
            f"unknown: {', '.join(unknown)}; loops: {', '.join(LOOPS)}; treatments: {', '.join(names)}", file=sys.stderr
        )
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = Plan(
        device=device, tiny=options.tiny or device.type == "cpu", rounds=options.rounds, steps=options.steps,
        until=time.monotonic() + options.budget, everything=options.all or bool(options.treatments),
    )  # fmt: skip
    print(conditions_line() + ("" if device.type == "cuda" else ": tiny loops, times mean nothing"))
    print(f"{'loop':18} {'treatment':24} {'before':>8} {'after':>8}  before / after")
    cells = measure_all(plan, options.loops or list(LOOPS), options.treatments or names)
    if options.json:
        options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
    return 1 if any(not cell.why and not cell.within_claim for cell in cells) else 0


def measure_all(plan: Plan, loops: list[str], names: list[str]) -> list[Cell]:
    """All cells, printed as they come. Those that compile come last, and what the time does not allow is said."""
    cells = []
    for treatment in sorted((t for t in TREATMENTS if t.name in names), key=_cost):
        for loop in loops:
            if not plan.everything and treatment.cures and not set(treatment.cures) & set(SHOWS[loop]):
                continue
            if time.monotonic() > plan.until:
                cells.append(Cell(loop=loop, treatment=treatment.name, why="not run: out of time (--budget)"))
            else:
                cells.append(measure_cell(plan, loop, LOOPS[loop], treatment))
            print(cells[-1], flush=True)
            _clean_up(treatment)
    return cells


def measure_cell(plan: Plan, name: str, build: Build, treatment: Treatment) -> Cell:
    """One cell; a treatment that fails is a cell that says so."""
    empty = Cell(loop=name, treatment=treatment.name, claimed=treatment.numerics.rtol)
    try:
        loop = _built(plan, build)
        reason = treatment.refuses(loop)
        if reason:
            return replace(empty, why=f"refused: {reason}")
        plain = losses(loop)
        noise = _difference(plain, losses(_built(plan, build)))
        treated_loop = _built(plan, build)
        with treatment.applied(treated_loop) as inside:
            difference = _difference(plain, losses(inside))
        before, after = _in_turn(plan, treated_loop, treatment)
    except TreatmentRefused as error:
        return replace(empty, why=f"refused: {' '.join(str(error).split())[:_LONGEST_WHY]}")
    except Exception as error:
        return replace(empty, why=f"failed: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
    pairs = zip(before.times_ns, after.times_ns, strict=True)
    return replace(
        empty,
        before_ms=before.median_ns / 1e6,
        after_ms=after.median_ns / 1e6,
        ratios=tuple(a / b for a, b in pairs),
        loss_difference=difference,
        noise=noise,
    )


def losses(loop: Loop) -> list[float]:
    """The losses of the first steps, read at the end."""
    assert loop.train_step is not None
    torch.manual_seed(_SEED)
    kept, batches = [], iter(loop.loader or ())
    for _ in range(_PARITY_STEPS):
        kept.append(loop.train_step(*next(batches)).clone())
    return torch.stack(kept).double().tolist()


def _in_turn(plan: Plan, loop: Loop, treatment: Treatment) -> tuple[Measurement, Measurement]:
    """Blocks of steps without and with the treatment, which of them first alternating."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(plan.rounds):
        for treated in (False, True) if turn % 2 == 0 else (True, False):
            if treated:
                with treatment.applied(loop) as inside:
                    times[True].append(block_ns(inside, steps=plan.steps, warmup=_WARMUP))
            else:
                times[False].append(block_ns(loop, steps=plan.steps, warmup=_WARMUP))
    return tuple(Measurement(name=treatment.name, times_ns=tuple(times[key])) for key in (False, True))  # type: ignore[return-value]


def _built(plan: Plan, build: Build) -> Loop:
    torch.manual_seed(_SEED)
    return build(plan.device, plan.tiny)


def _difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one, other, strict=True))


def _cost(treatment: Treatment) -> int:
    order = {"compile": 1, "compile_reduce_overhead": 2, "compile_max_autotune": 3}
    return order.get(treatment.name, 0)


def _clean_up(treatment: Treatment) -> None:
    gc.collect()
    if treatment.name.startswith("compile"):
        torch._dynamo.reset()  # and with it the memory of its CUDA graphs
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _options(argv: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="scripts/bench treatments")
    parser.add_argument("--loops", type=comma_separated, default=[])
    parser.add_argument("--treatments", type=comma_separated, default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--budget", type=float, default=140.0, help="seconds after which no new cell is begun")
    parser.add_argument("--all", action="store_true", help="every treatment on every loop, not only where it fits")
    parser.add_argument("--tiny", action="store_true", help="small sizes, as on a CPU")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
