"""Hold the readers against a folder of cases and traces: `scripts/try_cases DIR`.

Below DIR every `expected.json` of sort `trace-file` is a case, and every trace file in a folder named `traces` is read
and held against independent readers. A case's `make_*.py` is run, and what it prints is the truth of what it wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from perfdoctor.bench.hta_check import check_hta
from perfdoctor.bench.trace_checks import check_case, check_export, check_kineto, check_nsys
from perfdoctor.errors import CaptureError
from perfdoctor.record.load import load_capture

Row = tuple[str, list[str], str]  # name, problems, remark


def case_rows(root: Path, maker_mb: int) -> Iterator[Row]:
    """One row a file of every case."""
    for description in sorted(root.rglob("expected.json")):
        expected = json.loads(description.read_text(encoding="utf-8"))
        if expected.get("sort") != "trace-file":
            continue
        for file in expected["files"]:
            name = f"{description.parent.name}/{file}"
            if file.endswith(".py"):
                yield _made_row(description.parent / file, name, maker_mb)
            else:
                yield name, check_case(description.parent, file, expected), ""


def _made_row(maker: Path, name: str, megabytes: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="perfdoctor-") as folder:
        target = Path(folder) / "made.json"
        environment = {**os.environ, "SIZE_MB": str(megabytes)}
        command = [sys.executable, str(maker), str(target)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        started = time.perf_counter()
        problems = check_case(target.parent, target.name, {"truth": json.loads(done.stdout)})
        return name, problems, f"{megabytes} MB in {time.perf_counter() - started:.1f} s"


def trace_rows(root: Path) -> Iterator[Row]:
    """One row for every trace file in a folder named `traces`."""
    folders = [root] if root.name == "traces" else sorted(root.rglob("traces"))
    for file in sorted(file for folder in folders for file in folder.rglob("*") if file.is_file()):
        if file.name.endswith((".json", ".json.gz", ".sqlite")):
            yield _trace_row(file, str(file.relative_to(root)))


def _trace_row(file: Path, name: str) -> Row:
    started = time.perf_counter()
    try:
        capture = load_capture(file)
    except CaptureError as error:
        return name, [f"refused: {error}"], ""
    remark = f"{time.perf_counter() - started:.2f} s"
    if file.suffix == ".sqlite":
        problems = check_export(file, capture)
        judge, verdict = "nsys", check_nsys(file, capture)
    else:
        problems = check_kineto(file, capture)
        judge, verdict = "HTA", check_hta(file, capture)
    remark += f", {judge}: " + ("no judge" if verdict is None else "differs" if verdict else "equal")
    return name, problems + (verdict or []), remark


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line a file. 1 where one does not hold, 2 where nothing was found."""
    parser = argparse.ArgumentParser(prog="scripts/try_cases", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=20, help="size of the files that cases make themselves")
    options = parser.parse_args(arguments)
    count = failed = 0
    for rows in (case_rows(options.folder, options.megabytes), trace_rows(options.folder)):
        for name, problems, remark in rows:
            count, failed = count + 1, failed + bool(problems)
            print(f"{'FAIL' if problems else 'ok  '} {name:<72} {remark}", flush=True)
            print("".join(f"       {problem}\n" for problem in problems), end="")
    print(f"{count} files, {failed} failed")
    return 2 if not count else 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
