"""What being watched costs: a launch-bound step with each part of the hooks on and off, in turn.

    scripts/bench watching [--rounds 12] [--json FILE]

A step of 16 x (Linear, LayerNorm, GELU) with AdamW: about 6 ms on an H200, nothing but launches, the worst case for
anything that runs on the host. Blocks of steps with a part on follow blocks with it off, so that drift cancels; the
figure is the median of the paired ratios, with its quartiles. Last, the cost of one caught sync.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import quantiles
from typing import Any

BLOCK = 12
_MANY = 2000


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line a part."""
    import torch

    parser = argparse.ArgumentParser(prog="scripts/bench watching")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    step = _training_step(device)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    found["torch"] = torch.__version__
    for name, part in _parts().items():
        ratios, off_ms = compare(step, part, options.rounds)
        low, middle, high = quantiles(ratios, n=4)
        found[name] = {"off_ms": off_ms, "low": low, "median": middle, "high": high}
        spread = f"{100 * (low - 1):+.2f}..{100 * (high - 1):+.2f}"
        print(f"{name:34} {100 * (middle - 1):+6.2f} %  ({spread})  {off_ms:.2f} ms")
    if device == "cuda":
        found["caught_sync_us"] = _caught_sync_us()
        print(f"one caught .item(): {found['caught_sync_us']:+.2f} us")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def compare(
    step: Callable[[], None], part: Callable[[], AbstractContextManager[Any]], rounds: int
) -> tuple[list[float], float]:
    """Paired ratios on / off of a block's time, the order alternating; and the median time of a step off, ms."""
    ratios, offs = [], []
    for turn in range(rounds):
        times = {}
        for on in (True, False) if turn % 2 else (False, True):
            with part() if on else nullcontext():
                step()  # the edge of a block is not counted
                times[on] = _timed(step)
        ratios.append(times[True] / times[False])
        offs.append(times[False])
    return ratios, sorted(offs)[len(offs) // 2] / BLOCK


def _timed(step: Callable[[], None]) -> float:
    import torch

    settle: Callable[[], Any] = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    settle()
    start = time.perf_counter()
    for _ in range(BLOCK):
        step()
    settle()
    return 1e3 * (time.perf_counter() - start)


def _training_step(device: str) -> Callable[[], None]:
    import torch
    from torch import nn

    layers = [m for _ in range(16) for m in (nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64, 128, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(10):
        step()
    return step


def _parts() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    return {
        "nothing (noise)": nullcontext,
        "bare: step marks": _marks,
        "torch's sync warnings": lambda: _hooks(warnings_only=True),
        "sites: all call-site hooks": lambda: _hooks(warnings_only=False),
        "sites and step marks": _sites,
    }


@contextmanager
def _marks() -> Iterator[None]:
    from perfdoctor.watch.clocks import stamp_now
    from perfdoctor.watch.steps import StepDetector

    kept: list[Any] = []
    detector = StepDetector(stamp_now, kept.append)
    detector.install()
    try:
        yield
    finally:
        detector.remove()


@contextmanager
def _hooks(*, warnings_only: bool) -> Iterator[None]:
    from perfdoctor.record.call_site import HitLog
    from perfdoctor.watch.call_sites import CallSiteHooks

    hooks = CallSiteHooks(HitLog())
    try:
        hooks.catch_warnings()
        if not warnings_only:
            hooks.patch_calls()
        yield
    finally:
        hooks.remove()


@contextmanager
def _sites() -> Iterator[None]:
    with _marks(), _hooks(warnings_only=False):
        yield


def _caught_sync_us() -> float:
    import torch

    cell = torch.zeros((), device="cuda")

    def read() -> float:
        start = time.perf_counter()
        for _ in range(_MANY):
            cell.item()
        return time.perf_counter() - start

    read()
    differences = []
    for _ in range(7):
        bare = read()
        with _hooks(warnings_only=False):
            read()
            differences.append(read() - bare)
    return 1e6 * sorted(differences)[3] / _MANY


if __name__ == "__main__":
    sys.exit(main())
