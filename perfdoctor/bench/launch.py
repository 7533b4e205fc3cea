"""What it costs to start a small kernel: eager, and inside a CUDA graph."""

from __future__ import annotations

from functools import partial

from perfdoctor.bench.measurement import Measurement
from perfdoctor.bench.result import BenchResult, BenchRow
from perfdoctor.bench.timing import graph_of, wall_time

_ELEMENTS = 1024
NUM_LAUNCHES = 1000
SMALL_NUM_LAUNCHES = 200


def run_launch(device: str, *, small: bool) -> BenchResult:
    """The time a small in-place addition takes: launched back to back, waited for each time, replayed by a graph."""
    import torch

    count = SMALL_NUM_LAUNCHES if small else NUM_LAUNCHES
    block = torch.zeros(_ELEMENTS, device=device)
    add_one = partial(block.add_, 1.0)

    def many() -> None:
        for _ in range(count):
            add_one()

    rows = [
        _row(wall_time("eager, back to back", many, per_run=count, repeats=15), count),
        _row(wall_time("eager, waited for", add_one, repeats=100), 1),
    ]
    notes: list[str] = []
    if device == "cuda":
        whole, single = graph_of(add_one, count), graph_of(add_one, 1)
        rows.append(_row(wall_time("graph, per kernel", whole, per_run=count, repeats=15), count))
        rows.append(_row(wall_time("graph of one kernel, waited for", single, repeats=100), 1))
    else:
        notes.append("no GPU here: these are op calls on the CPU, and CUDA graphs are left out")
    facts = {f"{_key(row)}_us": row.measurement.median_ns / 1e3 for row in rows}
    return BenchResult(
        verb="launch",
        about=f"one small kernel ({_ELEMENTS} floats)",
        rows=tuple(rows),
        facts=facts,
        notes=tuple(notes),
    )


def _row(measurement: Measurement, count: int) -> BenchRow:
    return BenchRow(measurement=measurement, sizes={"launches": count}, dtype="float32")


def _key(row: BenchRow) -> str:
    return row.measurement.name.replace(",", "").replace(" ", "_")
