"""A launch-bound training step: eager, graphed_step, a graph replayed by hand, torch.compile(mode="reduce-overhead").

    scripts/bench graphed [--repeats N] [--steps N] [--compile gpt] [--loops gpt,tiny,norms]

`gpt` is a small GPT; `tiny` has a single-tensor optimizer, `norms` reads a norm of each gradient on the host, so that
its graphed form (one multi-tensor norm, returned as a tensor) is a change of the code as well. First 200 losses of the
graphed step are held against the eager step with the same capturable optimizer, bit for bit; dropout is on.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import perfdoctor
from perfdoctor.bench.measurement import Measurement, measure
from perfdoctor.bench.result import conditions_line

Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSize:
    """One launch-bound loop."""

    vocab: int
    dim: int
    depth: int
    heads: int
    length: int
    rows: int
    dropout: float
    autocast: bool = False
    norms: bool = False
    foreach: bool | None = None


LOOPS = {
    "gpt": LoopSize(vocab=1024, dim=128, depth=8, heads=4, length=64, rows=8, dropout=0.1),
    "tiny": LoopSize(vocab=2048, dim=128, depth=12, heads=4, length=64, rows=8, dropout=0.0, foreach=False),
    "norms": LoopSize(
        vocab=8192, dim=384, depth=10, heads=6, length=256, rows=24, dropout=0.0, autocast=True, norms=True
    ),
}  # fmt: skip


class Layer(nn.Module):
    """Attention and a two-layer perceptron, pre-norm."""

    def __init__(self, size: LoopSize) -> None:
        super().__init__()
        self.size = size
        self.norms = nn.ModuleList([nn.LayerNorm(size.dim), nn.LayerNorm(size.dim)])
        self.into, self.out = nn.Linear(size.dim, 3 * size.dim), nn.Linear(size.dim, size.dim)
        self.wide, self.narrow = nn.Linear(size.dim, 4 * size.dim), nn.Linear(4 * size.dim, size.dim)
        self.drop = nn.Dropout(size.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, dim = x.shape
        q, k, v = self.into(self.norms[0](x)).view(rows, length, 3, self.size.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, dim)
        x = x + self.drop(self.out(mixed))
        out: torch.Tensor = x + self.drop(self.narrow(F.gelu(self.wide(self.norms[1](x)))))
        return out


class Language(nn.Module):
    """A GPT."""

    def __init__(self, size: LoopSize) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(size.vocab, size.dim), nn.Embedding(size.length, size.dim)
        self.layers = nn.Sequential(*[Layer(size) for _ in range(size.depth)])
        self.head = nn.Sequential(nn.LayerNorm(size.dim), nn.Linear(size.dim, size.vocab))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.words(ids) + self.places.weight[: ids.shape[1]]))
        return logits


@dataclass(slots=True)
class Subject:
    """A model, its optimizer and its step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step


def build(size: LoopSize, *, read_norms: bool = False, compiled: bool = False) -> Subject:
    """A fresh loop: the same seed gives the same numbers."""
    torch.manual_seed(0)
    model: nn.Module = Language(size).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=size.foreach)
    parameters = list(model.parameters())
    if compiled:
        model.compile(mode="reduce-overhead")

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=size.autocast):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        if read_norms:
            sum(p.grad.norm().item() ** 2 for p in parameters if p.grad is not None)
        elif size.norms:
            perfdoctor.grad_norm(parameters)
        optimizer.step()
        return loss

    return Subject(model, optimizer, step)


def batches(size: LoopSize, count: int) -> list[torch.Tensor]:
    """Token ids, (rows, length + 1) int64, on the device."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    shape = (size.rows, size.length + 1)
    return [torch.randint(0, size.vocab, shape, device="cuda", generator=generator) for _ in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to run a loop."""

    measurement: Measurement
    peak_bytes: int


def _measured(name: str, step: Callable[[torch.Tensor], Any], given: list[torch.Tensor], options: Any) -> Row:
    count = [0]

    def several() -> None:
        for _ in range(options.steps):
            step(given[count[0] % len(given)])
            count[0] += 1

    several()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    found = measure(name, several, torch.cuda.synchronize, repeats=options.repeats, warmup=2, per_run=options.steps)
    return Row(measurement=found, peak_bytes=torch.cuda.max_memory_reserved())


def capturable(optimizer: torch.optim.Optimizer) -> None:
    """By hand what graphed_step does to AdamW."""
    for group in optimizer.param_groups:
        group["capturable"] = True
        group["lr"] = torch.tensor(group["lr"], device="cuda")


def _by_hand(subject: Subject, given: list[torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    """What graphed_step is held against: torch.cuda.CUDAGraph, used as torch's documentation does."""
    capturable(subject.optimizer)
    fixed = given[0].clone()
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            subject.step(fixed)
    torch.cuda.current_stream().wait_stream(side)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = subject.step(fixed)

    def replay(ids: torch.Tensor) -> torch.Tensor:
        fixed.copy_(ids)
        graph.replay()
        return loss

    return replay


def run_loop(name: str, size: LoopSize, options: Any) -> list[Row]:
    """All rivals of one loop, one after another, each on a model of its own."""
    given = batches(size, 16)
    rows = []

    def rival(label: str, make: Callable[[], Callable[[torch.Tensor], Any]]) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        row = _measured(label, make(), given, options)
        rows.append(replace(row, peak_bytes=row.peak_bytes - before))
        print(_line(name, rows[-1], rows[0]), flush=True)

    def graphed() -> Callable[[torch.Tensor], Any]:
        subject = build(size)
        step: Callable[[torch.Tensor], Any] = perfdoctor.graphed_step(
            subject.step, given[0], model=subject.model, optimizer=subject.optimizer
        )
        return step

    rival("eager", lambda: build(size, read_norms=size.norms).step)
    if size.norms:
        rival("eager, one norm, not read", lambda: build(size).step)
    rival("graphed_step", graphed)
    rival("CUDAGraph by hand", lambda: _by_hand(build(size), given))
    if options.compile and name in options.compile.split(","):
        rival("compile reduce-overhead", lambda: build(size, compiled=True).step)
    return rows


def equal_losses(size: LoopSize) -> tuple[int, int]:
    """How many of 200 losses are bitwise those of the eager step with the same optimizer: graphed, and eager again.

    With torch's deterministic algorithms: flash attention's backward pass adds up in any order otherwise.
    """
    given = batches(size, 200)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        losses = [_losses(size, given, use_graph) for use_graph in (False, True, False)]
    finally:
        torch.use_deterministic_algorithms(False)
    return int((losses[0] == losses[1]).sum()), int((losses[0] == losses[2]).sum())


def _losses(size: LoopSize, given: list[torch.Tensor], use_graph: bool) -> torch.Tensor:
    subject = build(size)
    capturable(subject.optimizer)
    torch.manual_seed(2)
    step: Any = subject.step
    if use_graph:
        step = perfdoctor.graphed_step(step, given[0], model=subject.model, optimizer=subject.optimizer)
    return torch.stack([step(ids).detach() for ids in given])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; 1 where a loss differs or a target is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench graphed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--steps", type=int, default=20, help="steps a timing")
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--compile", default="gpt", help="loops to run with torch.compile too (half a minute each)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("scripts/bench graphed: needs a CUDA device", file=sys.stderr)
        return 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms ask for it
    warnings.simplefilter("ignore")  # torch.compile and torch's schedulers talk; the table is what counts
    torch.set_float32_matmul_precision("high")
    print(f"{conditions_line()}; medians, spread is the interquartile range")
    missed = 0
    for name in options.loops.split(","):
        equal, again = equal_losses(LOOPS[name])
        print(f"{name:6} losses bitwise equal to eager: graphed {equal}, eager again {again}, of 200", flush=True)
        missed += equal != 200
        rows = {row.measurement.name: row for row in run_loop(name, LOOPS[name], options)}
        missed += _judged(name, rows)
    return 1 if missed else 0


def _judged(name: str, rows: dict[str, Row]) -> int:
    ours, eager = rows["graphed_step"].measurement.median_ns, rows["eager"].measurement.median_ns
    raw = rows["CUDAGraph by hand"].measurement.median_ns
    print(
        f"{name:6} graphed_step: {eager / ours:.2f}x faster than eager, {100 * (ours / raw - 1):+.1f} % against by hand"
    )
    return int(name == "gpt" and (eager / ours < 5 or ours / raw > 1.1))


def _line(name: str, row: Row, eager: Row) -> str:
    found = row.measurement
    text = (
        f"{name:6} {found.name:26} {found.median_ns / 1e6:8.3f} ms a step (spread {100 * found.spread:4.1f} %)  "
        f"{eager.measurement.median_ns / found.median_ns:5.2f}x  peak {row.peak_bytes / 1e6:8.1f} MB reserved"
    )
    return text if found.warning is None else f"{text}\n       {found.warning}"


if __name__ == "__main__":
    sys.exit(main())
