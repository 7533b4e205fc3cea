"""What being traced costs on this machine: tiny launches, bare and under the profiler."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from perfdoctor.record.capture import Costs
from perfdoctor.watch.device_events import new_event
from perfdoctor.watch.profile import FULL, LIGHT

_LAUNCHES = 200
_ROUNDS = 5
_COPY_BYTES = 16 << 20


def measure_costs() -> Costs:
    """The cost of a traced CUDA call and of a traced op, from 200 one-element additions a round; about 0.3 s.

    A one-element addition is one op and one launch: under a CUDA-only profile it pays for the call, under a full one
    for both. Draws no random number and runs outside autograd. Needs CUDA; waits for the device.
    """
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        cell = torch.zeros((), device="cuda")

        def launch() -> int:
            return _time_launches(cell, torch.cuda.synchronize)

        launch()
        bare = median(launch() for _ in range(_ROUNDS))
        light = _traced(launch, LIGHT)
        full = _traced(launch, FULL)
    call_ns = max(round((light - bare) / _LAUNCHES), 0)
    op_ns = max(round((full - light) / _LAUNCHES), 0)
    return Costs(call_ns=call_ns, op_ns=op_ns, measured=True)


def launch_cost() -> float:
    """Host time of one tiny launch as things stand, bare or traced, in ns: the median of five rounds of 200."""
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        cell = torch.zeros((), device="cuda")
        _time_launches(cell, torch.cuda.synchronize)
        return median(_time_launches(cell, torch.cuda.synchronize) for _ in range(_ROUNDS)) / _LAUNCHES


def measure_pinned_copy() -> int:
    """Bytes/s of a copy from pinned host memory, the best of a few of 16 MiB; under 10 ms. Needs CUDA; waits for it."""
    torch: Any = sys.modules["torch"]
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    best_ms = float("inf")
    for _ in range(_ROUNDS):
        start, end = (new_event(timed=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        best_ms = min(best_ms, start.elapsed_time(end))
    return round(_COPY_BYTES / best_ms * 1e3)


def _traced(launch: Callable[[], int], activities: Sequence[str]) -> float:
    from torch import profiler

    with warnings.catch_warnings():  # torch warns about cycles, of which there is one
        warnings.simplefilter("ignore")
        with profiler.profile(activities=[getattr(profiler.ProfilerActivity, name) for name in activities]):
            launch()
            return median(launch() for _ in range(_ROUNDS))


def _time_launches(cell: Any, synchronize: Callable[[], None]) -> int:
    synchronize()
    start = time.perf_counter_ns()
    for _ in range(_LAUNCHES):
        cell.add_(1.0)
    end = time.perf_counter_ns()
    synchronize()
    return end - start
