"""The kernels of this folder in one table: bytes moved, bandwidth, share of the roof. `scripts/bench kernels`.

The roof is what this GPU gives to torch's own sum (reading) and copy (reading and writing), measured in the same run.
Every result is held to PyTorch's in float64 first. Without a GPU the shapes are small and the figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from page_table import read_figures, render_markdown
from torch import Tensor
from variants import Variant, can_run, compiled, error_of

EXAMPLES = ("vector_add", "gelu", "softmax", "layer_norm", "tensor_sums")
_CUDA_SOURCES = ("vector_add", "gelu", "tensor_sums")
_SMALL = 64  # no side of a shape is longer where there is no GPU
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; the exit code is 1 where a variant failed or is wrong."""
    parser = argparse.ArgumentParser(prog="scripts/bench kernels", description=__doc__)
    parser.add_argument("--only", choices=EXAMPLES, action="append", help="this example (may be given again)")
    parser.add_argument("--tune", action="store_true", help="time every configuration of the Triton and CUDA C++ ones")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out (some 10 s for each shape)")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="measure nothing: print what --json wrote there")
    options = parser.parse_args(arguments)
    if options.markdown is not None:
        return _print_markdown(options.markdown)
    if options.json is not None and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
        parser.error(
            f"--json {options.json}: it is a folder, or its folder is not there; name a file that can be written"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = options.only or list(EXAMPLES)
    print(_conditions(device), flush=True)
    if device.type == "cuda":
        _compile_sources(chosen)
    roofs = _roofs(device)
    print("roofs: " + ", ".join(f"{name} {rate / 1e12:.2f} TB/s" for name, rate in roofs.items()), flush=True)
    rows: list[Row] = []
    left_out = ("compile",) if options.no_compile else ()
    for name in chosen:
        example = importlib.import_module(name)
        if options.tune:
            rows += _tune(example, _DTYPES[options.dtype], device, roofs)
        else:
            rows += _measure(example, _DTYPES[options.dtype], device, roofs, left_out)
    if options.json is not None:
        options.json.write_text(json.dumps({"conditions": _conditions(device), "roofs": roofs, "rows": rows}, indent=1))
    return 1 if any("failed" in row or row["wrong"] for row in rows) else 0


def _print_markdown(path: Path) -> int:
    try:
        print(render_markdown(read_figures(path)), end="")
    except (OSError, ValueError) as error:
        print(f"--markdown: {error}", file=sys.stderr)
        return 2
    return 0


def _conditions(device: torch.device) -> str:
    """The machine and the versions, in one line."""
    from perfdoctor.bench.result import conditions_line

    return conditions_line() + ("" if device.type == "cuda" else ": small shapes, the figures mean nothing")


def _compile_sources(chosen: list[str]) -> None:
    """The CUDA C++ sources side by side; one that fails says so in its own row."""

    def compile_one(name: str) -> None:
        with suppress(Exception):
            compiled(name)

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, [name for name in _CUDA_SOURCES if name in chosen]))


def _roofs(device: torch.device) -> dict[str, float]:
    """Bytes a second of torch's sum and copy of 4 GB (1 MB without a GPU)."""
    from perfdoctor.bench.timing import benchmark

    source = torch.ones(1 << 30 if device.type == "cuda" else 1 << 18, device=device)
    target = torch.empty_like(source)
    num_bytes = 4 * source.numel()
    reading = benchmark("read", lambda: source.sum(), bytes_moved=num_bytes)
    copying = benchmark("copy", lambda: target.copy_(source), bytes_moved=2 * num_bytes)
    return {"read": num_bytes / (reading.median_ns * 1e-9), "copy": 2 * num_bytes / (copying.median_ns * 1e-9)}


def _shapes(example: Any, device: torch.device) -> Iterator[tuple[str, tuple[int, ...]]]:
    for label, shape in example.SHAPES.items():
        if device.type == "cuda":
            yield label, shape
        else:
            yield f"{label}, no side over {_SMALL}", tuple(min(size, _SMALL) for size in shape[:_SMALL])


def _measure(
    example: Any, dtype: torch.dtype, device: torch.device, roofs: dict[str, float], left_out: tuple[str, ...]
) -> list[Row]:
    """Every variant on every shape, but for the kinds left out."""
    rows = []
    for label, shape in _shapes(example, device):
        inputs = example.make_inputs(shape, dtype, device)
        print(f"\n{example.TITLE}, {label}, {dtype}\n{_HEAD}", flush=True)
        least = min(variant.moved_bytes(example, inputs) for variant in example.VARIANTS)
        for variant in example.VARIANTS:
            if variant.kind in left_out:
                continue
            if not can_run(variant, device):
                print(f"{variant.name:<76} needs a GPU" + _hint(variant))
                continue
            row = {"example": example.TITLE, "shape": label, "dtype": str(dtype), "variant": variant.name}
            moved = variant.moved_bytes(example, inputs)
            rows.append(row | _timed(example, variant, inputs, moved, least, roofs[example.ROOF]))
            print(_line(rows[-1]), flush=True)
        del inputs
    return rows


def _tune(example: Any, dtype: torch.dtype, device: torch.device, roofs: dict[str, float]) -> list[Row]:
    """Every configuration on the first shape, and which was the fastest."""
    label, shape = next(_shapes(example, device))
    inputs = example.make_inputs(shape, dtype, device)
    least = min(variant.moved_bytes(example, inputs) for variant in example.VARIANTS)
    print(f"\n{example.TITLE}, {label}, {dtype}\n{_HEAD}", flush=True)
    rows: list[Row] = []
    for variant in example.configurations():
        if can_run(variant, device):
            row = {"example": example.TITLE, "shape": label, "dtype": str(dtype), "variant": variant.name}
            moved = variant.moved_bytes(example, inputs)
            rows.append(row | _timed(example, variant, inputs, moved, least, roofs[example.ROOF]))
            print(_line(rows[-1]), flush=True)
    fastest = sorted((row for row in rows if "ms" in row), key=lambda row: float(row["ms"]))
    for row in fastest[:3]:
        print(f"fast: {row['ms']:.3f} ms  {row['variant']}", flush=True)
    if not rows:
        print("nothing here runs without a GPU" + max(map(_hint, example.configurations()), default=""))
    return rows


def _timed(example: Any, variant: Variant, inputs: tuple[Any, ...], moved: int, least: int, roof: float) -> Row:
    """One row's figures; a failure is a row, not the end."""
    from perfdoctor.bench.timing import benchmark

    try:
        error = error_of(example, variant, inputs, variant.run(*inputs))
        call: Callable[[], Tensor] = lambda: variant.run(*inputs)  # noqa: E731
        measurement = benchmark(variant.name, call, bytes_moved=moved)
    except Exception as failure:
        return {"failed": f"{type(failure).__name__}: {str(failure)[:300]}", "wrong": False}
    seconds = measurement.median_ns * 1e-9
    return {
        "ms": 1e3 * seconds, "spread": measurement.spread, "moved_bytes": moved, "moved_per_s": moved / seconds,
        "useful_per_s": least / seconds, "of_roof": moved / seconds / roof, "error": error, "wrong": error > 1,
    }  # fmt: skip


_HEAD = (
    f"{'variant':<76}{'ms':>9}{'spread':>9}{'moved':>10}{'GB/s':>8}{'of the roof':>13}{'useful GB/s':>13}"
    f"{'error/allowed':>15}"
)


def _line(row: Row) -> str:
    from perfdoctor.units import format_bytes

    if "failed" in row:
        return f"{row['variant']:<76} FAILED {row['failed']}"
    return (
        f"{row['variant']:<76}{row['ms']:9.3f}{row['spread']:9.1%}{format_bytes(row['moved_bytes']):>10}"
        f"{row['moved_per_s'] / 1e9:8.0f}{row['of_roof']:13.1%}{row['useful_per_s'] / 1e9:13.0f}{row['error']:15.2f}"
        + ("  WRONG" if row["wrong"] else "")
    )


def _hint(variant: Variant) -> str:
    return " (or TRITON_INTERPRET=1)" if variant.kind == "triton" else ""


if __name__ == "__main__":
    sys.exit(main())
