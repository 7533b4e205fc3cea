"""How fast and in how much memory traces are read, beside HolisticTraceAnalysis and orjson on the same files.

Every reader runs in a process of its own, the readers take turns, the median counts. Memory is the peak above what the
process held after its imports. Bounds, from the project's goals: five times as fast as HTA's best mode that reads all
rows, no slower than orjson without garbage collection, at most 0.75 of the uncompressed file in memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from perfdoctor.bench.parse_worker import READERS
from perfdoctor.bench.synthetic_trace import write_trace
from perfdoctor.record.byte_stream import ByteStream

OURS = "perfdoctor"
PARTIAL = "HTA ijson, part"  # printed, and no bound: it leaves the Python rows of the file out
HTA_SPEEDUP = 5.0
MEMORY_RATIO = 0.75
_PACKAGES = {OURS: "perfdoctor", "orjson, GC off": "orjson", "HTA json": "hta", "HTA ijson": "hta", PARTIAL: "hta"}
_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One reader on one file. `seconds` and `peak_bytes` hold one value a round; empty where it failed."""

    reader: str
    seconds: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    error: str = ""


def measure(path: Path, readers: Sequence[str], rounds: int) -> list[Result]:
    """Run the readers on a file in turn, `rounds` times."""
    runs: dict[str, list[tuple[float, int]]] = {reader: [] for reader in readers}
    errors: dict[str, str] = {}
    for _ in range(rounds):
        for reader in readers:
            if reader in errors:
                continue
            outcome = _run(reader, path)
            if isinstance(outcome, str):
                errors[reader] = outcome
            else:
                runs[reader].append(outcome)
    return [
        Result(
            reader=reader,
            seconds=tuple(s for s, _ in runs[reader]),
            peak_bytes=tuple(b for _, b in runs[reader]),
            error=errors.get(reader, ""),
        )
        for reader in readers
    ]


def _run(reader: str, path: Path) -> tuple[float, int] | str:
    command = [sys.executable, "-m", "perfdoctor.bench.parse_worker", reader, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"over {_TIMEOUT_S} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    row = json.loads(done.stdout.splitlines()[-1])
    return float(row["seconds"]), int(row["peak_bytes"])


def available_readers() -> list[str]:
    """The readers whose packages are installed."""
    return [reader for reader in READERS if importlib.util.find_spec(_PACKAGES[reader]) is not None]


def lines_of(path: Path, size: int, results: Sequence[Result]) -> list[str]:
    """The table of one file."""
    lines = [f"{path.name}: {size / 1e6:.1f} MB uncompressed, {path.stat().st_size / 1e6:.1f} MB on disk"]
    for result in results:
        if not result.seconds:
            lines.append(f"  {result.reader:<18} failed: {result.error[:90]}")
            continue
        seconds, peak = median(result.seconds), median(result.peak_bytes)
        spread = f"{min(result.seconds):.2f}-{max(result.seconds):.2f}"
        lines.append(
            f"  {result.reader:<18} {seconds:7.3f} s ({spread})  {size / 1e6 / seconds:7.0f} MB/s"
            f"  {peak / 1e6:7.0f} MB  {peak / size:5.2f} x file"
        )
    return lines


def misses(size: int, results: Sequence[Result]) -> list[str]:
    """The bounds that a file's results miss."""
    times = {result.reader: median(result.seconds) for result in results if result.seconds}
    ours = next(result for result in results if result.reader == OURS)
    if OURS not in times:
        return [f"perfdoctor failed: {ours.error}"]
    found = []
    hta = min(
        (seconds for reader, seconds in times.items() if reader.startswith("HTA") and reader != PARTIAL), default=None
    )
    if hta is not None and hta < HTA_SPEEDUP * times[OURS]:
        found.append(f"{hta / times[OURS]:.1f} times HTA's best mode, wanted {HTA_SPEEDUP:.0f}")
    orjson = next((seconds for reader, seconds in times.items() if reader.startswith("orjson")), None)
    if orjson is not None and orjson < times[OURS]:
        found.append(f"slower than orjson: {times[OURS]:.3f} s against {orjson:.3f} s")
    if median(ours.peak_bytes) > MEMORY_RATIO * size:
        found.append(f"{median(ours.peak_bytes) / size:.2f} of the file in memory, wanted {MEMORY_RATIO}")
    return found


def uncompressed_bytes(path: Path) -> int:
    """The size of the JSON in a file. Reading it also warms the page cache alike for every reader."""
    return sum(len(chunk) for chunk in ByteStream(path))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure FILEs, or files written for the purpose where none is named. 1 where a bound is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench parse", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "files", nargs="*", type=Path, help="traces (.json, .json.gz); none: a synthetic one is written"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=60, help="size of the synthetic trace")
    parser.add_argument("--only", help="one reader, for a profile or a huge file")
    options = parser.parse_args(arguments)
    readers = [options.only] if options.only else available_readers()
    with tempfile.TemporaryDirectory(prefix="perfdoctor-") as folder:
        files = options.files
        if not files:
            files = [Path(folder) / f"synthetic_{options.megabytes}mb.json"]
            write_trace(files[0], options.megabytes * 1_000_000)
        return max(_measure_and_print(path, readers, options.rounds) for path in files)


def _measure_and_print(path: Path, readers: Sequence[str], rounds: int) -> int:
    size = uncompressed_bytes(path)
    results = measure(path, readers, rounds)
    print("\n".join(lines_of(path, size, results)))
    missed = misses(size, results) if OURS in readers else []
    print("".join(f"  MISSED: {line}\n" for line in missed), end="", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
