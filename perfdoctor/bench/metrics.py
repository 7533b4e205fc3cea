"""What metrics and NaN checks cost a launch-bound loop: ways to do them side by side, in one run.

    scripts/bench metrics [--rounds 15] [--steps 40] [--json FILE]

A step of 12 x (Linear, GELU) with fused AdamW on the same batch: the host cannot launch as fast as the GPU works, so
that whatever waits or launches shows. Each round runs a block of steps of every way, the order turning; the figures are
the median time of a step, its spread, and the median of the ratios to the bare loop of the same round. Every way keeps
the same two metrics (or checks the same loss and gradients) and no block reads anything at its end but what its way
reads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from perfdoctor.bench.measurement import Measurement
from perfdoctor.bench.result import conditions_line

BARE = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What every way trains: the same model and batch."""

    model: Any
    optimizer: Any
    x: Any
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to keep metrics or to check: `log(loss, accuracy)` after backward, `ended()` after the update."""

    name: str
    log: Callable[[Any, Any], object] = lambda loss, accuracy: None
    ended: Callable[[], object] = lambda: None
    around: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    watch: Any = None
    """the NonFiniteWatch of this way"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line a way."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench metrics", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40, help="in a block")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    loop = _loop(options.layers)
    ways = [Way(name=BARE), *_metric_ways(loop), *_nan_ways(loop), *_both(loop)]
    print(conditions_line(), flush=True)
    rows = _rows(_measured(loop, ways, options.rounds, options.steps))
    for row in rows:
        print(_line(row), flush=True)
    for way in ways:
        if way.watch is not None:
            print(
                f"{way.name}: {way.watch._launches.num_prepared} launches prepared (few: the gradients stay in place)"
            )
    if loop.device == "cuda":
        for name, microseconds in _alone(loop).items():
            print(f"{name:52} {microseconds:7.1f} us of the host a call", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"conditions": conditions_line(), "rows": rows}, indent=1), "utf-8")
    return 0


def _loop(num_layers: int) -> Loop:
    import torch
    from torch import nn

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(128, 128), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Loop(model=model, optimizer=optimizer, x=torch.randn(64, 128, device=device), device=device)


def _step(loop: Loop, way: Way) -> None:
    output = loop.model(loop.x)
    loss = output.square().mean()
    accuracy = (output.detach() > 0).float().mean()
    loss.backward()
    way.log(loss.detach(), accuracy)
    loop.optimizer.step()
    way.ended()
    loop.optimizer.zero_grad()


def _metric_ways(loop: Loop) -> Iterator[Way]:
    import perfdoctor

    yield Way(name="metrics: two .item() a step", log=lambda loss, accuracy: (loss.item(), accuracy.item()))
    yield Way(name="metrics: sums by torch operations", log=_torch_sums(loop.device))
    means = _torchmetrics_means(loop.device)
    if means is not None:
        yield Way(name="metrics: torchmetrics.MeanMetric.update", log=means)
    for every in (1, 10):
        metrics = perfdoctor.DeviceMetrics(every=every)
        yield Way(name=f"metrics: DeviceMetrics(every={every}), latest() a step", log=partial(_ours, metrics))


def _ours(metrics: Any, loss: Any, accuracy: Any) -> None:
    metrics.update(loss=loss, accuracy=accuracy)
    metrics.latest()


def _torch_sums(device: str) -> Callable[[Any, Any], object]:
    """What loops do that keep sums on the device: value times weight and weight, for each metric."""
    import torch

    sums = [torch.zeros((), device=device) for _ in range(4)]

    def log(loss: Any, accuracy: Any) -> None:
        for index, value in enumerate((loss, accuracy)):
            sums[2 * index].add_(value * 64)
            sums[2 * index + 1].add_(64)

    return log


def _torchmetrics_means(device: str) -> Callable[[Any, Any], object] | None:
    try:
        from torchmetrics import MeanMetric
    except ImportError:
        return None
    both = [MeanMetric(nan_strategy="disable").to(device) for _ in range(2)]

    def log(loss: Any, accuracy: Any) -> None:
        both[0].update(loss, 64)
        both[1].update(accuracy, 64)

    return log


def _nan_ways(loop: Loop) -> Iterator[Way]:
    import torch

    import perfdoctor

    def stop_at_nan(loss: Any, accuracy: Any) -> None:
        if torch.isnan(loss):
            raise FloatingPointError("the loss is NaN")

    def look_at_each(loss: Any, accuracy: Any) -> None:
        for name, parameter in loop.model.named_parameters():
            if not torch.isfinite(parameter.grad).all():
                raise FloatingPointError(name)

    def look_at_norm(loss: Any, accuracy: Any) -> None:
        torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in loop.model.parameters()], error_if_nonfinite=True
        )

    yield Way(name="NaN: if torch.isnan(loss)", log=stop_at_nan)
    yield Way(name="NaN: if not isfinite(grad).all(), each parameter", log=look_at_each)
    yield Way(name="NaN: get_total_norm(error_if_nonfinite=True)", log=look_at_norm)
    by_hand = perfdoctor.NonFiniteWatch(loop.model)
    yield Way(
        name="NaN: NonFiniteWatch by hand", log=lambda loss, _: by_hand.check(loss), ended=by_hand.step, watch=by_hand
    )
    for on_hit in ("raise", "skip"):
        watch = perfdoctor.NonFiniteWatch(loop.model, loop.optimizer, on_hit=on_hit)
        name = f"NaN: with NonFiniteWatch(on_hit={on_hit!r})"
        yield Way(name=name, log=partial(_check, watch), ended=watch.step, around=partial(_entered, watch), watch=watch)


def _check(watch: Any, loss: Any, accuracy: Any) -> None:
    watch.check(loss)


@contextmanager
def _entered(watch: Any) -> Iterator[None]:
    with watch:
        yield


def _both(loop: Loop) -> Iterator[Way]:
    import torch

    import perfdoctor

    def plain(loss: Any, accuracy: Any) -> None:
        if torch.isnan(loss):
            raise FloatingPointError("the loss is NaN")
        loss.item(), accuracy.item()

    metrics, watch = perfdoctor.DeviceMetrics(every=10), perfdoctor.NonFiniteWatch(loop.model)

    def ours(loss: Any, accuracy: Any) -> None:
        _ours(metrics, loss, accuracy)
        watch.check(loss)

    yield Way(name="both: isnan(loss) and two .item()", log=plain)
    yield Way(name="both: DeviceMetrics(every=10), NonFiniteWatch", log=ours, ended=watch.step)


def _measured(loop: Loop, ways: list[Way], rounds: int, steps: int) -> list[Measurement]:
    """The time of a step of each way, once a round."""
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for turn in range(-1, rounds):
        first = turn % len(ways)
        for way in ways[first:] + ways[:first]:
            with way.around():
                _step(loop, way)  # the edge of a block is not counted
                taken = _timed(loop, partial(_step, loop, way), steps)
            if turn >= 0:  # the round before the first compiles
                times[way.name].append(taken)
    return [Measurement(name=way.name, times_ns=tuple(times[way.name])) for way in ways]


def _timed(loop: Loop, run: Callable[[], object], count: int) -> float:
    _settle(loop)
    start = time.perf_counter_ns()
    for _ in range(count):
        run()
    _settle(loop)
    return (time.perf_counter_ns() - start) / count


def _settle(loop: Loop) -> None:
    import torch

    if loop.device == "cuda":
        torch.cuda.synchronize()


def _alone(loop: Loop) -> dict[str, float]:
    """Host time of one call with nothing else in the loop, us: what is launched runs meanwhile, and is waited for after
    every block of calls that fits the queue of launches, outside of the clock."""
    import torch

    import perfdoctor

    loss, accuracy = torch.ones((), device=loop.device), torch.ones((), device=loop.device)
    for parameter in loop.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    calls: dict[str, Callable[[], object]] = {}
    for every in (1, 10, 1000):
        metrics = perfdoctor.DeviceMetrics(every=every)
        calls[f"DeviceMetrics(every={every}).update"] = partial(metrics.update, loss=loss, accuracy=accuracy)
        calls[f"DeviceMetrics(every={every}).update, latest"] = partial(_ours, metrics, loss, accuracy)
    watches = [perfdoctor.NonFiniteWatch(loop.model) for _ in range(2)]
    found = {name: _host_us([call])[0] for name, call in calls.items()}
    check, step = _host_us([partial(watches[0].check, loss), watches[0].step])
    found["NonFiniteWatch.check(loss), with all gradients"] = check
    found["NonFiniteWatch.step"] = step
    found["NonFiniteWatch.check, step"] = check + step
    launches = watches[0]._launches
    found |= {f"  {name}": _host_us([call])[0] for name, call in _pieces(launches, watches[1]).items()}
    return found


def _pieces(launches: Any, watch: Any) -> dict[str, Callable[[], object]]:
    """What the calls are made of."""
    import torch

    from perfdoctor.kernels import stats_table, walker

    pairs = watch._pairs
    names = tuple(name for name, _ in pairs)
    rows = walker.gather_rows([parameter for _, parameter in pairs], False)
    assert rows is not None
    walk = walker.walk_of(rows)
    record = torch.zeros_like(launches._record)
    loss = torch.ones((), device=record.device)
    launches.note(None, loss, None, True, 0)
    return {
        f"walk over {len(pairs)} gradients": lambda: walk.matches_pairs(pairs, names),
        "find the table (a check that cannot repeat)": lambda: stats_table.find(pairs, None),
        "check of a loss alone": lambda: launches.repeat([], loss, None, True, 0),
        "record taken": lambda: launches.take(record),
    }


def _host_us(calls: Sequence[Callable[[], object]]) -> list[float]:
    """The median time of each call when they follow each other in turn."""
    import torch

    times: list[list[int]] = [[] for _ in calls]
    for number in range(41):
        torch.cuda.synchronize()
        for _ in range(20):
            for call, taken in zip(calls, times, strict=True):
                start = time.perf_counter_ns()
                call()
                if number:  # the first block compiles
                    taken.append(time.perf_counter_ns() - start)
    return [median(taken) / 1e3 for taken in times]


def _rows(measured: list[Measurement]) -> list[dict[str, Any]]:
    bare = measured[0].times_ns
    return [
        {
            "name": each.name,
            "median_us": each.median_ns / 1e3,
            "spread": each.spread,
            "ratio": median(time / base for time, base in zip(each.times_ns, bare, strict=True)),
            "warning": each.warning,
        }
        for each in measured
    ]


def _line(row: dict[str, Any]) -> str:
    added = row["median_us"] * (1 - 1 / row["ratio"])
    figures = f"{row['median_us']:8.0f} us  spread {100 * row['spread']:4.1f} %"
    return f"{row['name']:52} {figures}  {row['ratio']:.3f}x bare ({added:+.0f} us)"


if __name__ == "__main__":
    sys.exit(main())
