"""Square matrix products: time, TFLOP/s, where the cubic law starts to hold, and up to where the CPU wins.

On a GPU the time is the device's: the replay of a CUDA graph of many products back to back, divided by their number.
A small product alone is timed wrong: 1024^3 in bfloat16 took 5.4 us on an H200 in such a graph, 9.4 us between two
events of its own, and 21 where the host did not keep up. What fits into the L2 cache is read from there. Where the CPU
still wins is another question, asked by wall times from the call to the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from perfdoctor.bench.memory import fitting
from perfdoctor.bench.result import BenchResult, BenchRow
from perfdoctor.bench.timing import benchmark, wall_time
from perfdoctor.errors import UsageError

DIMS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SMALL_DIMS = (32, 64, 128, 256, 512)
_CPU_LIMIT_DIM = 2048
_GRAPH_FLOPS = 5 * 10**11  # of one replay: 0.5 ms or more at any speed there is; two events are 5 us
_MAX_GRAPH_CALLS = 100  # of the smallest: 0.2 ms
_CUBIC_TOLERANCE = 0.25  # of the exponent: twice the side takes 6.7 to 9.5 times as long


def num_flops(dim: int) -> int:
    """Of one product of two `dim` x `dim` matrices: dim^3 multiplications and as many additions."""
    return 2 * dim**3


def bytes_moved(dim: int, itemsize: int) -> int:
    """At least: two matrices are read, one is written."""
    return 3 * dim**2 * itemsize


def calls_a_graph(dim: int) -> int:
    """How many products of this side one graph holds, so that its replay takes far longer than two events."""
    return max(1, min(_MAX_GRAPH_CALLS, _GRAPH_FLOPS // num_flops(dim)))


def run_matmul(device: str, *, small: bool, dims: Sequence[int] | None = None) -> BenchResult:
    """Time `dims` in float32 (on a GPU without TF32) and, on a GPU, in bfloat16.

    Raises:
        UsageError: a dim below 1, or no dim that fits the free memory.
    """
    chosen = _checked(dims if dims is not None else SMALL_DIMS if small else DIMS)
    kept, notes = fitting("matmul", chosen, lambda dim: bytes_moved(dim, 4), device)
    dtypes = ("float32", "bfloat16") if device == "cuda" else ("float32",)
    rows: list[BenchRow] = []
    facts: dict[str, Any] = {}
    with _full_precision():
        for dtype in dtypes:
            found = [_row(dim, dtype, device, small) for dim in kept]
            facts[f"cubic_from_dim_{dtype}"] = cubic_onset(
                kept, [row.measurement.median_ns for row in found], tolerance=_CUBIC_TOLERANCE
            )
            rows += found
        notes += [_cubic_note(dtype, facts[f"cubic_from_dim_{dtype}"], len(kept)) for dtype in dtypes]
        if device == "cuda":
            compared, until, note = _against_cpu([dim for dim in kept if dim <= _CPU_LIMIT_DIM])
            facts["cpu_wins_until_dim"] = until
            rows += compared
            notes.append(note)
        else:
            notes.append("no GPU here: whether the CPU still wins cannot be compared")
    return BenchResult(verb="matmul", about="square matrix products", rows=tuple(rows), facts=facts, notes=tuple(notes))


def cubic_onset(dims: Sequence[int], times: Sequence[float], tolerance: float = _CUBIC_TOLERANCE) -> int | None:
    """The smallest dim from which on the time grows as dim^3, to the end; None where the last pair does not.

    `dims` ascend; the exponent between neighbours, log(t2 / t1) / log(d2 / d1), is within `tolerance` of 3.
    """
    onset = None
    for i in range(len(dims) - 2, -1, -1):
        exponent = math.log(times[i + 1] / times[i]) / math.log(dims[i + 1] / dims[i])
        if abs(exponent - 3) > tolerance:
            break
        onset = dims[i]
    return onset


def cpu_wins_until(cpu_ns: Mapping[int, float], gpu_ns: Mapping[int, float]) -> int | None:
    """The largest dim up to which the CPU is faster at every dim that both were timed at; None where it never is."""
    until = None
    for dim in sorted(cpu_ns.keys() & gpu_ns.keys()):
        if cpu_ns[dim] >= gpu_ns[dim]:
            break
        until = dim
    return until


def _checked(dims: Sequence[int]) -> list[int]:
    if not dims:
        raise UsageError("matmul: no dim given; name one or more, as 1024,2048")
    for dim in dims:
        if dim < 1:
            raise UsageError(f"matmul: dim {dim} is no side of a matrix; give whole numbers from 1 up, as 1024,2048")
    return sorted(set(dims))


def _row(dim: int, dtype: str, device: str, small: bool) -> BenchRow:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    left, right = (torch.randn(dim, dim, device=device, dtype=kind) for _ in range(2))
    out = torch.empty_like(left)
    found = benchmark(
        f"matmul {dim} {dtype}", lambda: torch.mm(left, right, out=out), device=device,
        num_flops=num_flops(dim), bytes_moved=bytes_moved(dim, left.element_size()), budget_s=0.1 if small else 0.5,
        graph_calls=calls_a_graph(dim) if device == "cuda" else 0,
    )  # fmt: skip
    return BenchRow(measurement=found, sizes={"dim": dim}, dtype=dtype, on_roofline=True)


def _against_cpu(dims: Sequence[int]) -> tuple[list[BenchRow], int | None, str]:
    """Wall times of float32 products, from the call to the result, the matrices in place on each side."""
    import torch

    rows, walls = [], {"cpu": dict[int, float](), "cuda": dict[int, float]()}
    for dim in dims:
        for device in ("cpu", "cuda"):
            left, right = (torch.randn(dim, dim, device=device) for _ in range(2))
            out = torch.empty_like(left)
            found = wall_time(
                f"matmul {dim} float32, wall, {'CPU' if device == 'cpu' else 'GPU'}",
                partial(torch.mm, left, right, out=out),
                num_flops=num_flops(dim), repeats=15,
            )  # fmt: skip
            walls[device][dim] = found.median_ns
            rows.append(BenchRow(measurement=found, sizes={"dim": dim}, dtype="float32"))
    until = cpu_wins_until(walls["cpu"], walls["cuda"])
    if until is None:
        return rows, None, "the CPU wins at no dim that was tried" if dims else "no dim small enough for the CPU"
    return rows, until, f"the CPU still wins up to dim {until} (float32, wall time, matrices already in place)"


def _cubic_note(dtype: str, onset: int | None, num_dims: int) -> str:
    if num_dims < 2:
        return f"{dtype}: one dim alone does not tell how the time grows"
    if onset is None:
        return f"{dtype}: the time does not grow as dim^3 yet; larger dims would show where it starts"
    return f"{dtype}: from dim {onset} on the time grows as dim^3"


@contextmanager
def _full_precision() -> Iterator[None]:
    """float32 without TF32, and as before at the end."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
