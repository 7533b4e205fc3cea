"""Slow and fixed scripts side by side: what perfdoctor says the guilty lines cost, against what fixing them gave.

    scripts/bench pairs FOLDER... [--json FILE]

A folder is a pair (`slow.py` and `fixed.py`) or holds pairs. The truth is measured in one process (pair_scripts.py),
then comes `perfdoctor run` on the slow one. Times are in ms a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perfdoctor.bench.pair_scripts import Truth, find_pairs, guilty_lines, measure_truth, run_verb
from perfdoctor.bench.result import conditions_line


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """One pair. All times in ms a step; None where nothing was found or priced."""

    name: str
    truth: Truth
    guilty_found: bool  # each of the marked lines
    rank: int | None  # place of the first guilty finding among all, from 1
    code: str
    low: float | None
    predicted: float | None
    high: float | None
    step: float
    overheads: dict[str, float]

    @property
    def error(self) -> float | None:
        """Predicted less true, as a share of the slow step."""
        return None if self.predicted is None else (self.predicted - self.truth.saved) / self.truth.slow


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a guilty line was not found."""
    parser = argparse.ArgumentParser(prog="scripts/bench pairs", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(argv)
    pairs = find_pairs(options.folders)
    if not pairs:
        print(f"{options.folders[0]}: no slow.py and fixed.py in it", file=sys.stderr)
        return 2
    rows = []
    for pair in pairs:
        rows.append(measure(pair, options.steps))
        print(_line(rows[-1]), flush=True)
    print(conditions_line())
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if all(row.guilty_found for row in rows) else 1


def measure(pair: Path, steps: int) -> PairRow:
    """Run one pair."""
    truth = measure_truth(pair)
    return judge(pair.name, truth, run_verb("run", pair / "slow.py", steps), guilty_lines(pair / "slow.py"))


def judge(name: str, truth: Truth, report: dict[str, Any], lines: set[int]) -> PairRow:
    """Hold a report against the truth."""
    guilty = guilty_findings(report, lines)
    spoken = {finding["site"]["line"]: finding["headroom"] for _, finding in guilty if finding["headroom"]}
    named = {finding["site"]["line"] for _, finding in guilty}
    return PairRow(
        name=name,
        truth=truth,
        guilty_found=named == lines,
        rank=min((rank for rank, _ in guilty), default=None),
        code="+".join(dict.fromkeys(finding["code"] for _, finding in guilty)),
        low=sum(room["low_ms"] for room in spoken.values()) if spoken else None,
        predicted=sum(room["mid_ms"] for room in spoken.values()) if spoken else None,
        high=sum(room["high_ms"] for room in spoken.values()) if spoken else None,
        step=(report["verdict"]["step"] or {}).get("median_ms", 0.0),
        overheads={row["phase"]: row["ratio"] for row in report["overheads"]},
    )


def guilty_findings(report: dict[str, Any], lines: set[int]) -> list[tuple[int, dict[str, Any]]]:
    """The finding that speaks for each guilty line, with its rank.

    One line may carry two (a loop and the reads in it): the one that gives more speaks for it.
    """
    best: dict[int, tuple[int, dict[str, Any]]] = {}
    for rank, finding in enumerate([*report["findings"], *report["leave_alone"]], 1):
        line = (finding["site"] or {}).get("line")
        if line in lines and (line not in best or _mid(finding) > _mid(best[line][1])):
            best[line] = (rank, finding)
    return sorted(best.values(), key=lambda row: row[0])


def _mid(finding: dict[str, Any]) -> float:
    return float((finding["headroom"] or {}).get("mid_ms", 0.0))


def _line(row: PairRow) -> str:
    predicted = "withheld" if row.predicted is None else f"{row.predicted:6.2f} ({row.low:.2f}..{row.high:.2f})"
    error = "" if row.error is None else f"{100 * row.error:+5.1f} %"
    found = f"#{row.rank} {row.code}" if row.guilty_found else f"NOT FOUND {row.code}"
    overheads = " ".join(f"{phase} {100 * ratio:+.0f}%" for phase, ratio in row.overheads.items())
    truth = row.truth
    return (
        f"{row.name:18} slow {truth.slow:7.2f} fixed {truth.fixed:7.2f} truth {truth.saved:6.2f} "
        f"({truth.low:.2f}..{truth.high:.2f})  predicted {predicted:24} error {error:8} {found:18} "
        f"seen step {row.step:.2f}  {overheads}"
    )


if __name__ == "__main__":
    sys.exit(main())
