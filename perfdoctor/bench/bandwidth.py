"""Bandwidth of device memory, the L2 cache, and the copies between host and device."""

from __future__ import annotations

from collections.abc import Callable

from perfdoctor.bench.memory import fitting
from perfdoctor.bench.result import BenchResult, BenchRow
from perfdoctor.bench.timing import benchmark

MEMORY_BYTES = (1 << 32, 1 << 30, 1 << 28, 1 << 26)
SMALL_MEMORY_BYTES = (1 << 26, 1 << 24)
TRANSFER_BYTES = (1 << 20, 1 << 28)
SMALL_TRANSFER_BYTES = (1 << 20, 1 << 24)
_L2_CALLS = 20
_L2_SHARE = 4  # source and target fill half the cache: each half of an H100's may hold a copy of its own


def run_bandwidth(device: str, *, small: bool) -> BenchResult:
    """Read, copy and write of memory; on a GPU also the L2 cache, and H2D and D2H from pageable and pinned memory.

    Raises:
        UsageError: not even the smallest block fits the free memory.
    """
    sizes = SMALL_MEMORY_BYTES if small else MEMORY_BYTES
    kept, notes = fitting("a block of bytes", sizes, lambda size: 2 * size, device)
    rows = _memory_rows(kept[0], device)
    if device == "cuda":
        rows += _l2_rows()
        transfers, left_out = fitting(
            "a transfer of bytes", SMALL_TRANSFER_BYTES if small else TRANSFER_BYTES, lambda size: 2 * size, "cpu"
        )
        notes += left_out
        for size in transfers:
            rows += _transfer_rows(size)
    else:
        notes.append("no GPU here: L2, H2D and D2H are left out")
    facts = {_fact_name(row): row.measurement.bytes_per_s for row in rows}
    return BenchResult(
        verb="bandwidth", about="bytes a second", rows=tuple(rows), facts=facts, notes=tuple(notes)
    )  # fmt: skip


def _memory_rows(size: int, device: str) -> list[BenchRow]:
    """torch's sum reads, its copy reads and writes, its fill writes."""
    import torch

    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return [
        _timed("memory read", source.sum, size, size, device, num_flops=size // 4),
        _timed("memory copy", lambda: target.copy_(source), size, 2 * size, device),
        _timed("memory write", lambda: target.fill_(1.0), size, size, device),
    ]


def _l2_rows() -> list[BenchRow]:
    """A block that stays in the cache, read and copied by a graph's replay: an eager launch takes longer."""
    import torch

    cache: int = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    size = max(1 << 20, cache // _L2_SHARE) // 4 * 4
    source = torch.ones(size // 4, device="cuda")
    target = torch.empty_like(source)
    return [
        _timed("L2 read", source.sum, size, size, "cuda", graph_calls=_L2_CALLS),
        _timed("L2 copy", lambda: target.copy_(source), size, 2 * size, "cuda", graph_calls=_L2_CALLS),
    ]


def _transfer_rows(size: int) -> list[BenchRow]:
    import torch

    block = torch.empty(size, dtype=torch.uint8, device="cuda")
    rows = []
    for memory in ("pageable", "pinned"):
        # Filled, or the pages of a new block would be one page of zeros.
        host = torch.ones(size, dtype=torch.uint8, pin_memory=memory == "pinned")
        into, out_of = _copy(block, host), _copy(host, block)
        rows.append(_timed(f"H2D {memory}", into, size, size, "cuda"))
        rows.append(_timed(f"D2H {memory}", out_of, size, size, "cuda"))
    return rows


def _copy(target: object, source: object) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)  # type: ignore[attr-defined]


def _timed(
    name: str, fn: Callable[[], object], size: int, moved: int, device: str, *, num_flops: int | None = None,
    graph_calls: int = 0,
) -> BenchRow:  # fmt: skip
    found = benchmark(
        name, fn, bytes_moved=moved, num_flops=num_flops, device=device, graph_calls=graph_calls, budget_s=0.5
    )
    return BenchRow(measurement=found, sizes={"bytes": size}, on_roofline=num_flops is not None)


def _fact_name(row: BenchRow) -> str:
    name = row.measurement.name.lower().replace(" ", "_")
    suffix = f"_{row.sizes['bytes'] >> 20}_mib" if name.startswith(("h2d", "d2h")) else ""
    return f"{name}{suffix}_bytes_per_s"
