"""`python -m perfdoctor.bench.kernels`: the kernels of examples/kernels in one table.

Bytes moved, GB/s and share of the roof for every variant; `--tune` times every configuration instead.
The examples are part of the checkout, not of the installed package.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kernels"


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit code: 2 where the examples are not there."""
    if not (FOLDER / "table.py").is_file():
        print(f"{FOLDER} is not there: run scripts/bench kernels in a checkout of perfdoctor", file=sys.stderr)
        return 2
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    code: int = importlib.import_module("table").main(arguments)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
