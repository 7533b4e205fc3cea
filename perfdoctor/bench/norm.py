"""`python -m perfdoctor.bench.norm`: the norm of all gradients, ours against PyTorch's ways, on one machine in one run.

GPU time is that of a CUDA graph's replay by CUDA events, divided by the calls in it; wall time is from the call to
its completion.
Gradients that fit into the L2 cache are read from there, as they are by every rival in the same row.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfdoctor.bench.gradient_sets import GRADIENT_SETS, SMALL_SETS, GradientSet
from perfdoctor.bench.measurement import Measurement, measure
from perfdoctor.bench.memory import free_bytes
from perfdoctor.bench.result import BenchResult, BenchRow
from perfdoctor.bench.timing import benchmark, graph_of, settle

if TYPE_CHECKING:
    from torch import Tensor, nn

Row = dict[str, Any]
_COMPILED_TENSORS = range(100, 150)  # torch.compile of thousands of norms takes minutes


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m perfdoctor.bench.norm", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    parser.add_argument("--only", help="only the sets whose name contains this")
    parser.add_argument("--sweep", action="store_true", help="try other chunk lengths, programs and cache policies")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out (it takes long to compile)")
    options = parser.parse_args(arguments)
    sets = [chosen for chosen in _sets_here() if options.only is None or options.only in chosen.name]
    work = _sweep if options.sweep else _measure_set
    bandwidth = _guarded({}, "read bandwidth", _read_bandwidth)
    rows = []
    for chosen in sets:
        rows.append(work(chosen, not options.no_compile, bandwidth))
        print(_lines(rows[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"read_bandwidth": bandwidth, "sets": rows}, indent=1), "utf-8")
    print(_table(rows, bandwidth) if not options.sweep else "")
    return 1 if any(row["errors"] for row in rows) else 0


def _sets_here() -> tuple[GradientSet, ...]:
    import torch

    if not torch.cuda.is_available():
        return SMALL_SETS
    free = free_bytes("cuda")
    return tuple(chosen for chosen in GRADIENT_SETS if 2.2 * _num_bytes(chosen) < free)


def _num_bytes(chosen: GradientSet) -> int:
    return sum(math.prod(shape) for shape in chosen.shapes()) * (2 if chosen.bfloat16 else 4)


def _guarded(row: Row, name: str, work: Callable[[], Any]) -> Any:
    """A failure is a line of the table, not its end."""
    try:
        return work()
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        row.setdefault("errors", []).append(f"{name}: {type(error).__name__}: {str(error)[:500]}")
        return None


def _read_bandwidth() -> float | None:
    """Bytes a second of torch's own sum over 4 GB."""
    import torch

    if not torch.cuda.is_available():
        return None
    block = torch.randn(1 << 30, device="cuda")
    time = _gpu_time("sum", lambda: block.sum(), 5)
    return 4 * block.numel() / (time.median_ns * 1e-9)


def _gpu_time(name: str, run: Callable[[], object], per_graph: int) -> Measurement:
    """GPU time of one `run`, by replay of a graph of several."""
    return benchmark(name, run, device="cuda", graph_calls=per_graph, repeats=20)


def _measure_set(chosen: GradientSet, compiles: bool, bandwidth: float | None, twin: bool = True) -> Row:
    """Every figure of one set; `twin`: also the CUDA C++ kernel, which takes nvcc a minute the first time."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    row: Row = {"name": chosen.name, "bytes": _num_bytes(chosen), "errors": [], "measurements": []}
    row["floor_us"] = 1e6 * row["bytes"] / bandwidth if bandwidth else None
    row["targets_us"] = {"GPU": chosen.gpu_us, "fixed": chosen.fixed_us, "verified": chosen.verified_us}
    parameters = _guarded(row, chosen.name, lambda: chosen.parameters(device))
    if parameters is None:
        return row
    row["tensors"] = len(parameters)
    for name, work in _candidates(parameters, row["bytes"], compiles, device, twin):
        measurement = _guarded(row, name, work)
        if measurement is not None:
            row["measurements"].append(_as_json(name, measurement))
    row.update(_guarded(row, "accuracy", partial(_accuracy, parameters)) or {})
    parameters.clear()
    if device == "cuda":
        from perfdoctor.kernels import stats_table
        from perfdoctor.kernels.launch_route import TABLES

        stats_table.forget()
        TABLES.clear()
        torch.cuda.empty_cache()
    return row


def _as_json(name: str, measurement: Measurement) -> Row:
    times = [round(ns / 1e3, 3) for ns in measurement.times_ns]
    return {"name": name, "median_us": measurement.median_ns / 1e3, "spread": measurement.spread, "times_us": times}


def _candidates(
    parameters: list[nn.Parameter], num_bytes: int, compiles: bool, device: str, twin: bool
) -> list[tuple[str, Callable[[], Measurement]]]:
    """What is measured: name, and the work that measures it. `GPU` and `graph` need a device."""
    import torch

    from perfdoctor.kernels.grad_stats import clip_grad_norm_, grad_norm, grad_stats

    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    calls: list[tuple[str, Callable[[], object]]] = [
        ("grad_norm", lambda: grad_norm(parameters)),
        ("grad_stats", lambda: grad_stats(named)),
        # A negative norm scales on every call, and leaves the gradients as large as they are after the first.
        ("clip, clipping", lambda: clip_grad_norm_(parameters, -1.0)),
        ("clip, not needed", lambda: clip_grad_norm_(parameters, 1e9)),
        ("foreach_norm", lambda: torch.nn.utils.get_total_norm(gradients)),
        ("torch clip_grad_norm_", lambda: torch.nn.utils.clip_grad_norm_(parameters, -1.0)),
    ]
    if device == "cuda" and twin:
        calls.insert(1, ("grad_norm, CUDA C++", lambda: grad_norm(parameters, kernel="cuda")))
    if compiles and len(parameters) in _COMPILED_TENSORS and device == "cuda":
        compiled = torch.compile(torch.nn.utils.get_total_norm)
        calls.append(("torch.compile", lambda: compiled(gradients)))
    per_graph = max(2, min(20, int(2e8 // num_bytes)))
    repeats = 30 if num_bytes < 1e9 else 10
    work: list[tuple[str, Callable[[], Measurement]]] = []
    for name, call in calls:
        work.append((f"{name} | wall", _wall_work(name, call, repeats)))
        if device == "cuda":
            work.append((f"{name} | GPU", _gpu_work(name, call, per_graph)))
    if device == "cuda":
        work.append(("grad_norm | fixed", _fixed_work(lambda: grad_norm(parameters), repeats)))
    work.append(("loop | wall", _wall_work("loop", lambda: _loop(gradients), 5)))
    work.append(("loop + item | wall", _wall_work("loop + item", lambda: _loop_item(gradients), 3)))
    return work


def _wall_work(name: str, call: Callable[[], object], repeats: int) -> Callable[[], Measurement]:
    return lambda: measure(name, call, settle, repeats=repeats)


def _gpu_work(name: str, call: Callable[[], object], per_graph: int) -> Callable[[], Measurement]:
    return lambda: _gpu_time(name, call, per_graph)


def _fixed_work(call: Callable[[], object], repeats: int) -> Callable[[], Measurement]:
    """Wall time where the table is fixed: the replay of a graph that holds one call."""
    return lambda: measure("fixed", graph_of(call, 1), settle, repeats=max(repeats, 30))


def _loop(gradients: list[Tensor]) -> Tensor:
    import torch

    norm: Tensor = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return norm


def _loop_item(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(gradient.norm().item() ** 2 for gradient in gradients))


def _accuracy(parameters: list[nn.Parameter]) -> Row:
    """Relative errors against float64, and whether repeats agree bit for bit."""
    import torch

    from perfdoctor.kernels.grad_stats import grad_norm

    square = 0.0
    for parameter in parameters:
        if parameter.grad is not None:
            for piece in torch.split(parameter.grad.reshape(-1), 1 << 27):
                square += float(piece.double().square().sum())
    exact = math.sqrt(square)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    ours = grad_norm(parameters)
    repeated = all(torch.equal(ours, grad_norm(parameters)) for _ in range(3))
    theirs = torch.nn.utils.get_total_norm(gradients)
    return {
        "relative_error": abs(float(ours) / exact - 1),
        "torch_relative_error": abs(float(theirs) / exact - 1),
        "same_bits": repeated,
    }


def run_norm(device: str, *, small: bool) -> BenchResult:
    """The verb `norm` of `perfdoctor bench`: the sets up to 1.3 B parameters, without what must be compiled first."""
    sets = SMALL_SETS if small or device == "cpu" else tuple(each for each in _sets_here() if not each.bfloat16)
    rows, errors = [], []
    for chosen in sets:
        found = _measure_set(chosen, compiles=False, bandwidth=None, twin=False)
        errors += [f"{chosen.name}: {error}" for error in found["errors"]]
        rows += [_bench_row(chosen, each) for each in found["measurements"]]
    notes = [f"failed: {error}" for error in errors] + ["every rival and the large sets: scripts/bench norm"]
    return BenchResult(verb="norm", about="the norm of all gradients", rows=tuple(rows), notes=tuple(notes))


def _bench_row(chosen: GradientSet, found: Row) -> BenchRow:
    """Bytes and operations (a square and a sum an element) are those of one read: of the norm, not of clipping."""
    plain = found["name"].startswith(("grad_norm |", "foreach_norm |"))
    num_bytes = _num_bytes(chosen)
    measurement = Measurement(
        name=f"{chosen.name}: {found['name']}",
        times_ns=tuple(1e3 * us for us in found["times_us"]),
        bytes_moved=num_bytes if plain else None,
        num_flops=2 * num_bytes // 4 if plain else None,
    )
    # A small set's norm is bound by its launch, and a set near the size of the L2 is read from there in part.
    drawn = found["name"] == "grad_norm | GPU" and num_bytes > 2e8
    return BenchRow(measurement=measurement, sizes={"bytes": num_bytes}, dtype="float32", on_roofline=drawn)


_SWEEP_SETS = range(50_000_000, 6_000_000_000)
_CHUNKS_KIB = (32, 64, 128)
_KEPT_SHARES = (0.0, 0.3, 0.5, 0.7, 2.0)
_SCALES = ((2048, 8), (4096, 4), (4096, 6), (4096, 8), (8192, 3), (8192, 4))


def _sweep(chosen: GradientSet, compiles: bool, bandwidth: float | None) -> Row:
    """GPU time of the norm, of scaling and of the statistics for what could be chosen otherwise."""
    import torch

    row: Row = {"name": chosen.name, "bytes": _num_bytes(chosen), "errors": [], "measurements": []}
    row["floor_us"] = 1e6 * row["bytes"] / bandwidth if bandwidth else None
    if row["bytes"] not in _SWEEP_SETS:
        return row
    parameters: list[Tensor] = list(chosen.parameters("cuda"))
    for name, work in _variants(parameters):
        per_graph = max(2, min(20, int(2e8 // row["bytes"])))
        measurement = _guarded(row, name, partial(_gpu_time, name, work, per_graph))
        if measurement is not None:
            row["measurements"].append(_as_json(name, measurement))
    parameters.clear()
    torch.cuda.empty_cache()
    return row


def _variants(parameters: list[Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each choice for itself, the others as they are by default."""
    from perfdoctor.kernels import pointer_table, triton_launch

    def norm(table: Any) -> Callable[[], object]:
        return _afresh(table, lambda: triton_launch.norm(table, pointer_table.L2, 1.0))

    for kib in _CHUNKS_KIB:
        for share in _KEPT_SHARES:
            yield f"norm: {kib} KiB chunks, {share:g} of L2 kept", norm(_table_with(parameters, kib, share))
        table = _table_with(parameters, kib, 0.5)
        yield f"stats: {kib} KiB chunks", _afresh(table, partial(triton_launch.stats, table))
    for programs in (2, 3, 5, 8):
        yield f"norm: {programs} programs", norm(_table_with(parameters, None, 0.5, programs))
    for span, programs in _SCALES:
        for store in ("", ".cs"):
            table = _table_with(parameters, None, 0.5, programs)
            table.scale_span, table.scale_store = span, store
            table.coefficient.fill_(-1.0)  # scales on every call, and changes no magnitude
            yield (
                f"scale: {span} words, {programs} programs, {store or 'plain'}",
                _afresh(table, partial(triton_launch.scale, table)),
            )


def _table_with(parameters: list[Tensor], kib: int | None, share: float, programs: int | None = None) -> Any:
    import torch

    from perfdoctor.kernels import pointer_table, walker

    rows = walker.gather_rows(parameters, False)
    assert rows is not None
    device = torch.device("cuda", torch.cuda.current_device())
    words = None if kib is None else kib * 256
    table = pointer_table.build_table(rows, device, pointer_table.current_stream(device), words)
    kept = share * torch.cuda.get_device_properties(device).L2_cache_size
    table.num_kept = table.work.num_leading_chunks(kept)
    table.per_multiprocessor = programs
    settle()
    return table


def _afresh(table: Any, launch: Callable[[], object]) -> Callable[[], object]:
    def call() -> object:
        table.launches.clear()  # what was prepared belongs to the stream of before
        return launch()

    return call


def _lines(row: Row) -> str:
    """One set: every figure, with its spread, bandwidth and the floor."""
    lines = [f"{row['name']}: {row['bytes'] / 1e6:.1f} MB, {row.get('tensors', '')} tensors, floor "
             f"{row['floor_us']:.1f} us" if row["floor_us"] else row["name"]]  # fmt: skip
    for measurement in row["measurements"]:
        rate = row["bytes"] / measurement["median_us"] / 1e6
        lines.append(f"  {measurement['name']:<44} {measurement['median_us']:>10.1f} us  +-{measurement['spread']:.0%}"
                     f"  {rate:6.2f} TB/s")  # fmt: skip
    if "relative_error" in row:
        lines.append(f"  relative error {row['relative_error']:.1e} (torch {row['torch_relative_error']:.1e}), "
                     f"repeats agree bit for bit: {row['same_bits']}")  # fmt: skip
    lines += [f"  FAILED {error}" for error in row["errors"]]
    return "\n".join(lines)


def _table(rows: list[Row], bandwidth: float | None) -> str:
    """The summary: times in us, what they should be at most in brackets."""
    read = f"; torch's sum reads {bandwidth / 1e12:.2f} TB/s; {_walk()}" if bandwidth else ""
    heads = ("floor", "GPU", "wall, fixed", "wall, verified", "stats GPU", "clip GPU", "torch: norm GPU", "norm wall",
             "clip GPU", "clip wall")  # fmt: skip
    names = ("grad_stats | GPU", "clip, clipping | GPU", "foreach_norm | GPU", "foreach_norm | wall",
             "torch clip_grad_norm_ | GPU", "torch clip_grad_norm_ | wall")  # fmt: skip
    lines = ["", f"medians in us (at most){read}", f"{'gradients':<17}" + "".join(f"{head:>17}" for head in heads)]
    for row in rows:
        found = {measurement["name"]: measurement["median_us"] for measurement in row["measurements"]}
        targets = row.get("targets_us", {})
        cells = [
            _cell(row["floor_us"], None),
            _cell(found.get("grad_norm | GPU"), targets.get("GPU")),
            _cell(found.get("grad_norm | fixed"), targets.get("fixed")),
            _cell(found.get("grad_norm | wall"), targets.get("verified")),
            *(_cell(found.get(name), None) for name in names),
        ]
        lines.append(f"{row['name']:<17}" + "".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)


def _walk() -> str:
    from perfdoctor.kernels.walker import compiled_walker

    return "pointers are walked in C++" if compiled_walker() is not None else "pointers are walked in Python"


def _cell(value: float | None, target: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if target is None else f"{value:.1f} ({target:g}{'' if value <= target else ' !'})"


if __name__ == "__main__":
    raise SystemExit(main())
