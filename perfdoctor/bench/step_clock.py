"""What the bare clock of a long run costs the host, a step: scripts/bench step_clock."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from perfdoctor.bench.result import conditions_line
from perfdoctor.units import format_duration
from perfdoctor.watch.clocks import stamp_now
from perfdoctor.watch.long_run import LongClock, StepClock
from perfdoctor.watch.steps import StepDetector, now


def main(argv: Sequence[str] | None = None) -> int:
    """Print the host time of one step's end, medians and spread over the rounds."""
    parser = argparse.ArgumentParser(prog="bench step_clock", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="ends of steps in a round")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)
    print(conditions_line())
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    detector, clock, long = StepDetector(now, lambda _: None), StepClock(), LongClock()
    long.install()
    try:
        rows: tuple[tuple[str, Callable[[], object]], ...] = (
            ("finding the end of a step (StepDetector)", lambda: detector.updated(optimizer)),
            ("a stamp with a new event (a session's)", stamp_now),
            ("the clock: a stamp from the ring, and reading the old ones", lambda: clock.ended(clock.stamp())),
            ("all of it, hooks on rare things included", lambda: long.steps.updated(optimizer)),
        )
        for name, call in rows:
            times = [_per_call_ns(call, options.steps) for _ in range(options.rounds)]
            low, mid, high = min(times), statistics.median(times), max(times)
            spread = f"{format_duration(low)} to {format_duration(high)}"
            print(f"{name:<60} {format_duration(mid):>9}  ({spread})")
    finally:
        long.remove()
    return 0


def _per_call_ns(call: Callable[[], object], number: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(number):
        call()
    return (time.perf_counter_ns() - start) / number


if __name__ == "__main__":
    raise SystemExit(main())
