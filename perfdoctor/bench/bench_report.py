"""What `perfdoctor bench` found, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from perfdoctor.bench.measurement import format_flops
from perfdoctor.bench.result import BenchResult, BenchRow, Conditions
from perfdoctor.bench.roofs import Roofs, find_roofs, shares
from perfdoctor.units import format_bytes, format_duration, format_share

SCHEMA_VERSION = 1


def render_bench_text(results: Sequence[BenchResult], where: Conditions) -> str:
    """One table a verb, its notes below it."""
    roofs = find_roofs(results, where.device_name)
    lines = [_conditions_line(where), *_roof_lines(roofs)]
    for result in results:
        lines += ["", f"{result.verb}: {result.about}", *_table(result, roofs)]
        lines += [f"  {note}" for note in result.notes]
        doubts = [row.measurement.warning for row in result.rows if row.measurement.warning]
        if doubts:
            lines.append(f"  {len(doubts)} of {len(result.rows)} times are unsteady; the first, {doubts[0]}")
    return "\n".join(lines) + "\n"


def render_bench_json(results: Sequence[BenchResult], where: Conditions) -> str:
    """Times in microseconds; rates a second; a figure that was not measured is null."""
    roofs = find_roofs(results, where.device_name)
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": "bench",
        "conditions": asdict(where),
        "roofs": asdict(roofs),
        "verbs": [_verb(result, roofs) for result in results],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _verb(result: BenchResult, roofs: Roofs) -> dict[str, Any]:
    return {
        "verb": result.verb,
        "rows": [_row(row, result.verb, roofs) for row in result.rows],
        "facts": dict(result.facts),
        "notes": list(result.notes),
    }


def _row(row: BenchRow, verb: str, roofs: Roofs) -> dict[str, Any]:
    found = row.measurement
    of_measured, of_vendor = shares(row, verb, roofs)
    return {
        "name": found.name,
        "sizes": dict(row.sizes),
        "dtype": row.dtype or None,
        "median_us": found.median_ns / 1e3,
        "spread_ratio": found.spread,
        "num_times": len(found.times_ns),
        "bytes_moved": found.bytes_moved,
        "num_flops": found.num_flops,
        "bytes_per_s": found.bytes_per_s,
        "flops_per_s": found.flops_per_s,
        "of_measured_ratio": of_measured,
        "of_vendor_ratio": of_vendor,
        "warning": found.warning,
    }


def _conditions_line(where: Conditions) -> str:
    parts = [where.device_name]
    if where.driver:
        parts.append(f"driver {where.driver}")
    if where.cuda and where.device == "cuda":
        parts.append(f"CUDA {where.cuda}")
    parts += [f"torch {where.torch}", f"{where.num_cpus:g} CPUs, {where.num_threads} threads"]
    return ", ".join(parts) + ("; small sizes, to see that it runs" if where.small else "")


def _roof_lines(roofs: Roofs) -> list[str]:
    parts = [f"{dtype} {format_flops(peak)}" for dtype, peak in roofs.flops_per_s.items()]
    if roofs.bytes_per_s is not None:
        parts.append(f"memory {format_bytes(roofs.bytes_per_s)}/s")
    lines = [f"best measured in this run: {', '.join(parts)}"] if parts else []
    if roofs.vendor is not None:
        peaks = ", ".join(f"{dtype} {format_flops(peak)}" for dtype, peak in roofs.vendor.flops_per_s.items())
        lines.append(f"{roofs.vendor.source}: {peaks}, memory {format_bytes(roofs.vendor.bytes_per_s)}/s")
    return lines


def _table(result: BenchResult, roofs: Roofs) -> list[str]:
    heads = ("", "median", "spread", "FLOP/s", "bytes/s", "of measured", "of vendor's")
    cells = [heads, *(_cells(row, result.verb, roofs) for row in result.rows)]
    used = [i for i in range(len(heads)) if i < 2 or any(line[i] for line in cells[1:])]
    widths = {i: max(len(line[i]) for line in cells) for i in used}
    return [
        "  " + "  ".join(line[i].ljust(widths[i]) if i == 0 else line[i].rjust(widths[i]) for i in used)
        for line in cells
    ]


def _cells(row: BenchRow, verb: str, roofs: Roofs) -> tuple[str, ...]:
    found = row.measurement
    of_measured, of_vendor = shares(row, verb, roofs)
    size = row.sizes.get("bytes")
    name = f"{found.name}, {format_bytes(size)}" if size and verb == "bandwidth" else found.name
    return (
        name,
        format_duration(found.median_ns),
        f"+-{100 * found.spread:.0f} %",
        "" if found.flops_per_s is None else format_flops(found.flops_per_s),
        "" if found.bytes_per_s is None else f"{format_bytes(found.bytes_per_s)}/s",
        "" if of_measured is None else format_share(of_measured),
        "" if of_vendor is None else format_share(of_vendor),
    )
