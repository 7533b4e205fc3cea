"""`scripts/bench prefetch`: ways to bring batches to the device, on one training loop in one run.

A small convolutional net on images, one step of SGD a batch. Every way feeds the same loop from a pool of batches, in
blocks that follow each other in turn, so that drift cancels; a step is the time between the ends of two steps on the
device, the mean over a block. Then what each way holds of the device's memory over many epochs of small batches.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import perfdoctor
from perfdoctor.bench.measurement import Measurement
from perfdoctor.bench.result import conditions_line
from perfdoctor.units import format_bytes, format_ms

Batch = tuple[torch.Tensor, torch.Tensor]
Feed = Callable[[Iterable[Batch]], Iterable[Batch]]  # a loader -> what the loop iterates
DEVICE = "cuda"
ON_DEVICE, OURS = "on the device already", "DevicePrefetcher, unpinned"
TARGET_RATIO = 1.05
_SETTLING_STEPS = 12  # the rings are full, the allocator has what it needs, and the host runs ahead
_FLAT_RATIO = 0.01


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; the exit code is 1 where a target is missed, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="scripts/bench prefetch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="blocks of every way")
    parser.add_argument("--steps", type=int, default=30, help="timed steps in a block")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=192, help="pixels along an edge")
    parser.add_argument("--width", type=int, default=64, help="channels of the first block")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=100, help="of small batches, for the memory")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("scripts/bench prefetch: needs a CUDA device")
        return 2
    print(_conditions(options))
    times, peaks = measure_ways(options)
    print(_table(times, peaks))
    reserved = {name: _reserved_over_epochs(feed, pinned, options) for name, (feed, pinned) in ways(options).items()}
    print(_memory_table(reserved, options.epochs))
    if options.json is not None:
        options.json.write_text(json.dumps(_figures(times, peaks, reserved), indent=1), "utf-8")
    return 0 if _is_met(times, reserved) else 1


def ways(options: argparse.Namespace) -> dict[str, tuple[Feed, bool]]:
    """Name -> (the feed, whether its pool is pinned)."""
    ours = partial(perfdoctor.DevicePrefetcher, device=DEVICE, depth=options.depth)
    return {
        ON_DEVICE: (partial(_Through, resident), False),
        ".to(device), unpinned": (partial(_Through, plain), False),
        "non_blocking, pinned": (partial(_Through, non_blocking), True),
        "record_stream, unpinned": (partial(_Through, record_stream), False),
        "record_stream, pinned": (partial(_Through, record_stream), True),
        OURS: (ours, False),
        "DevicePrefetcher, pinned": (ours, True),
    }


class _Through:
    """A loader seen through a generator function."""

    def __init__(self, function: Callable[[Iterable[Batch]], Iterator[Batch]], loader: Iterable[Batch]) -> None:
        self._function = function
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return self._function(self._loader)


class _Pool:
    """A loader that hands out a pool's batches over and over."""

    def __init__(self, pool: Sequence[Batch], count: int) -> None:
        self._pool = pool
        self._count = count

    def __iter__(self) -> Iterator[Batch]:
        return (self._pool[i % len(self._pool)] for i in range(self._count))

    def __len__(self) -> int:
        return self._count


def resident(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Each batch is copied once, before the first step."""
    copies = {id(x): (x.to(DEVICE), y.to(DEVICE)) for x, y in loader}
    return (copies[id(x)] for x, _ in loader)


def plain(loader: Iterable[Batch]) -> Iterator[Batch]:
    """A blocking copy in every step."""
    for x, y in loader:
        yield x.to(DEVICE), y.to(DEVICE)


def non_blocking(loader: Iterable[Batch]) -> Iterator[Batch]:
    """The copy is queued before the step's kernels, on their stream."""
    for x, y in loader:
        yield x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)


def record_stream(loader: Iterable[Batch]) -> Iterator[Batch]:
    """One batch ahead on a side stream, into new memory each time; `record_stream` tells the allocator who reads it."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    waiting: Batch | None = None
    for x, y in loader:
        with torch.cuda.stream(side):
            following = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
        if waiting is not None:
            yield waiting
        current = torch.cuda.current_stream()
        current.wait_stream(side)
        for tensor in following:
            tensor.record_stream(current)
        waiting = following
    if waiting is not None:
        yield waiting


def training_step(width: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """One update of a net of four stages of two convolutions, in bf16 autocast and channels_last."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    before = 3
    for stage in range(4):
        after = width << stage
        for stride in (2, 1):
            layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
            before = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 100)]
    model = nn.Sequential(*layers).to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def host_pool(batch: int, size: int, pinned: bool, num_batches: int = 4) -> list[Batch]:
    """Random images and labels in host memory."""
    made = []
    for _ in range(num_batches):
        pair = torch.randn(batch, 3, size, size), torch.randint(0, 100, (batch,))
        made.append((pair[0].pin_memory(), pair[1].pin_memory()) if pinned else pair)
    return made


def measure_ways(options: argparse.Namespace) -> tuple[list[Measurement], dict[str, int]]:
    """Step times of every way, a block of each in turn; and the most that the allocator reserved in a block."""
    step = training_step(options.width)
    pools = {pinned: host_pool(options.batch, options.size, pinned) for pinned in (False, True)}
    found: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    for turn in range(options.rounds):
        order = list(ways(options).items())
        for name, (feed, pinned) in order[::-1] if turn % 2 else order:
            _forget_memory()
            loader = _Pool(pools[pinned], _SETTLING_STEPS + options.steps)
            found.setdefault(name, []).append(_block_ns(feed(loader), step))
            peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_reserved())
    return [Measurement(name=name, times_ns=tuple(found[name])) for name in ways(options)], peaks


def _block_ns(batches: Iterable[Batch], step: Callable[[torch.Tensor, torch.Tensor], None]) -> float:
    """Mean time of a step on the device, the first ones left out."""
    ends = []
    for x, y in batches:
        step(x, y)
        ends.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        ends[-1].record()
    torch.cuda.synchronize()
    timed = ends[_SETTLING_STEPS - 1 :]
    return 1e6 * float(timed[0].elapsed_time(timed[-1])) / (len(timed) - 1)


def _forget_memory() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _reserved_over_epochs(feed: Feed, pinned: bool, options: argparse.Namespace) -> tuple[int, int]:
    """What the allocator holds after two epochs of small batches, the last one partial, and after all of them."""
    pool = host_pool(64, 32, pinned) + host_pool(20, 32, pinned, 1)
    step = training_step(8)
    _forget_memory()
    early, batches = 0, feed(_Pool(pool, len(pool)))
    for epoch in range(options.epochs):
        for x, y in batches:
            step(x, y)
        if epoch == 1:
            early = torch.cuda.memory_reserved()
    torch.cuda.synchronize()
    return early, torch.cuda.memory_reserved()


def _is_met(times: Sequence[Measurement], reserved: dict[str, tuple[int, int]]) -> bool:
    median = {measurement.name: measurement.median_ns for measurement in times}
    early, late = reserved[OURS]
    return median[OURS] <= TARGET_RATIO * median[ON_DEVICE] and abs(late - early) <= _FLAT_RATIO * early


def _conditions(options: argparse.Namespace) -> str:
    image_bytes = 12 * options.batch * options.size**2
    return (
        f"{conditions_line()}\n"
        f"{options.batch} x 3 x {options.size} x {options.size} fp32, {format_bytes(image_bytes)} a batch; "
        f"{options.rounds} blocks of {options.steps} steps of every way in turn"
    )


def _table(times: Sequence[Measurement], peaks: dict[str, int]) -> str:
    known = next(measurement.median_ns for measurement in times if measurement.name == ON_DEVICE)
    lines = [f"{'way':<28}{'step, median':>14}{'spread':>9}{'to on device':>14}{'peak reserved':>15}"]
    for measurement in times:
        ratio = measurement.median_ns / known
        mark = "" if measurement.name != OURS else f"  (target {TARGET_RATIO:.2f})"
        lines.append(
            f"{measurement.name:<28}{format_ms(measurement.median_ns):>14}{measurement.spread:>9.1%}{ratio:>14.3f}"
            f"{format_bytes(peaks[measurement.name]):>15}{mark}"
        )
    return "\n".join([*lines, *(measurement.warning for measurement in times if measurement.warning)])


def _memory_table(reserved: dict[str, tuple[int, int]], epochs: int) -> str:
    lines = [f"\n{'reserved memory':<28}{'2 epochs':>14}{f'{epochs} epochs':>14}"]
    for name, (early, late) in reserved.items():
        lines.append(f"{name:<28}{format_bytes(early):>14}{format_bytes(late):>14}")
    return "\n".join(lines)


def _figures(times: Sequence[Measurement], peaks: dict[str, int], reserved: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": measurement.name,
            "times_ns": measurement.times_ns,
            "peak_reserved_bytes": peaks[measurement.name],
            "reserved_bytes": reserved[measurement.name],
        }
        for measurement in times
    ]


if __name__ == "__main__":
    raise SystemExit(main())
