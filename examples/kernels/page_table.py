"""What `scripts/bench kernels --json FILE` wrote, as the Markdown table of the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_HEADS = ("kernel", "variant", "ms", "moved", "GB/s", "of the roof", "useful GB/s", "error/allowed")
_RULE = "|---|---|" + "---:|" * (len(_HEADS) - 2)


def read_figures(path: Path) -> dict[str, Any]:
    """The figures in a file that `--json` wrote.

    Raises ValueError for another file, naming what is missing; OSError where it cannot be read.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON ({error}); give a file that scripts/bench kernels --json wrote") from error
    missing = [
        name for name in ("conditions", "roofs", "rows") if not isinstance(document, dict) or name not in document
    ]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; give a file that scripts/bench kernels --json wrote")
    return dict(document)


def render_markdown(document: dict[str, Any]) -> str:
    """The machine and the roofs in a sentence, then one row a variant, the kernel named at its first."""
    roofs = ", ".join(f"{name} {rate / 1e12:.2f} TB/s" for name, rate in document["roofs"].items())
    lines = [f"{document['conditions']}; roofs: {roofs}.", "", f"| {' | '.join(_HEADS)} |", _RULE]
    before = None
    for row in document["rows"]:
        kernel = f"{row['example']}, {row['shape']}, {row['dtype'].removeprefix('torch.')}"
        lines.append(f"| {' | '.join(('' if kernel == before else kernel, row['variant'], *_figures(row)))} |")
        before = kernel
    return "\n".join(lines) + "\n"


def _figures(row: dict[str, Any]) -> tuple[str, ...]:
    from perfdoctor.units import format_bytes

    if "failed" in row:
        return ("failed", "", "", "", "", "")
    rates = (f"{row['moved_per_s'] / 1e9:.0f}", f"{row['of_roof']:.1%}", f"{row['useful_per_s'] / 1e9:.0f}")
    error = f"{row['error']:.2f}" + (" (wrong)" if row["wrong"] else "")
    return (f"{row['ms']:.4g}", format_bytes(row["moved_bytes"]), *rates, error)
