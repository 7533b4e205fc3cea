"""Slow and fixed scripts side by side: what perfdoctor says the guilty line costs, against what fixing it gave.

    scripts/bench pairs FOLDER [--json FILE]

FOLDER holds one folder a pair, with `slow.py` and `fixed.py`; in `slow.py` the guilty line ends in `# GUILTY: kind`.
Both run bare twice in turn (steps between two optimizer updates, by CUDA events, the first third left out), then
`perfdoctor run` on the slow one, with the comment stripped. Times are medians in ms a step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

_MARK = re.compile(r"[ \t]*# GUILTY:[^\n]*")
_TIMED = "\nperfdoctor-bare "


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """One pair. All times in ms a step; None where nothing was found or priced."""

    name: str
    slow: float
    fixed: float
    guilty_found: bool
    rank: int | None  # place of the guilty finding among all, from 1
    code: str
    low: float | None
    predicted: float | None
    high: float | None
    step: float
    overheads: dict[str, float]

    @property
    def truth(self) -> float:
        return self.slow - self.fixed

    @property
    def error(self) -> float | None:
        """Predicted less true, as a share of the slow step."""
        return None if self.predicted is None else (self.predicted - self.truth) / self.slow


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a guilty line was not found."""
    parser = argparse.ArgumentParser(prog="scripts/bench pairs", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)  # a child's script
    options = parser.parse_args(argv)
    if options.bare:
        return _run_bare(options.bare)
    pairs = sorted(path.parent for path in options.folder.glob("*/slow.py"))
    if not pairs:
        print(f"{options.folder}: no */slow.py in it", file=sys.stderr)
        return 2
    rows = []
    for pair in pairs:
        rows.append(measure(pair, options.steps))
        print(_line(rows[-1]), flush=True)
    print(_conditions())
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if all(row.guilty_found for row in rows) else 1


def measure(pair: Path, steps: int) -> PairRow:
    """Run one pair."""
    times: dict[str, list[float]] = {"slow.py": [], "fixed.py": []}
    for _ in range(2):
        for name, found in times.items():
            found.append(_bare_ms(pair / name, steps))
    report = _diagnosed(pair / "slow.py", steps)
    lines = _guilty_lines(pair / "slow.py")
    return _judge(pair.name, median(times["slow.py"]), median(times["fixed.py"]), report, lines)


def _judge(name: str, slow: float, fixed: float, report: dict[str, Any], lines: set[int]) -> PairRow:
    everything = [*report["findings"], *report["leave_alone"]]
    guilty = [(i, f) for i, f in enumerate(everything, 1) if f.get("site") and f["site"]["line"] in lines]
    # One line may carry two findings (a loop and the reads in it): the one that gives more speaks for it.
    best = max(guilty, key=lambda found: (found[1]["headroom"] or {}).get("mid_ms", 0.0), default=None)
    headroom = (best[1]["headroom"] or {}) if best else {}
    return PairRow(
        name=name,
        slow=slow,
        fixed=fixed,
        guilty_found=best is not None,
        rank=best[0] if best else None,
        code=best[1]["code"] if best else "",
        low=headroom.get("low_ms"),
        predicted=headroom.get("mid_ms"),
        high=headroom.get("high_ms"),
        step=(report["verdict"]["step"] or {}).get("median_ms", 0.0),
        overheads={o["phase"]: o["ratio"] for o in report["overheads"]},
    )


def _line(row: PairRow) -> str:
    predicted = "withheld" if row.predicted is None else f"{row.predicted:6.2f} ({row.low:.2f}..{row.high:.2f})"
    error = "" if row.error is None else f"{100 * row.error:+5.1f} %"
    found = f"#{row.rank} {row.code}" if row.guilty_found else "NOT FOUND"
    overheads = " ".join(f"{phase} {100 * ratio:+.0f}%" for phase, ratio in row.overheads.items())
    return (
        f"{row.name:18} slow {row.slow:7.2f} fixed {row.fixed:7.2f} truth {row.truth:6.2f}  predicted {predicted:24} "
        f"error {error:8} {found:18} seen step {row.step:.2f}  {overheads}"
    )


def _guilty_lines(script: Path) -> set[int]:
    return {i for i, line in enumerate(script.read_text().splitlines(), 1) if _MARK.search(line)}


def _diagnosed(script: Path, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "slow.py"
        copy.write_text(_MARK.sub("", script.read_text()))
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", "perfdoctor", "run", "--format", "json", "-o", str(out), str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(steps))
        if not out.exists():
            raise SystemExit(f"{script}: perfdoctor run ended with {done.returncode}\n{done.stderr[-2000:]}")
        report: dict[str, Any] = json.loads(out.read_text())
        return report


def _bare_ms(script: Path, steps: int) -> float:
    command = [sys.executable, "-m", "perfdoctor.bench.pairs", ".", "--bare", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(steps))
    if _TIMED not in done.stdout:
        raise SystemExit(f"{script}: ended with {done.returncode}\n{done.stderr[-2000:]}")
    return float(done.stdout.rsplit(_TIMED, 1)[1])


def _environment(steps: int) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "STEPS": str(steps), "PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))}


def _run_bare(script: Path) -> int:
    """In a child: run a script with an event at the end of each optimizer step, print the median of the later steps."""
    import runpy

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    events: list[Any] = []

    def mark(*_: Any) -> None:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        events.append(event)

    register_optimizer_step_post_hook(mark)
    runpy.run_path(str(script), run_name="__main__")
    torch.cuda.synchronize()
    later = events[len(events) // 3 :]
    times = [a.elapsed_time(b) for a, b in pairwise(later)]
    # The mean, as what a run takes; steps of a loop bound by its device alternate with the launch queue.
    print(f"{_TIMED}{sum(times) / len(times):.4f}")
    return 0


def _conditions() -> str:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, torch {torch.__version__}, {os.cpu_count()} CPUs"


if __name__ == "__main__":
    sys.exit(main())
