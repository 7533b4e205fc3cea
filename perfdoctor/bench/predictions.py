"""perfdoctor's predictions held against what fixing the script really gave.

    scripts/bench predictions [FOLDER...] [--json FILE] [--merge FILE...]

A folder is a pair (`slow.py` and `fixed.py`) or holds pairs; without one it is examples/pairs. For each pair: the truth
(both scripts in one process, in turn: pair_scripts.py), then `perfdoctor trial` on the slow script, which gives the
headroom from replay and the counterfactual with its interval.

Errors are in percent of the step: what is said as a share of the step in the run that says it, less the true share. One
process to the next, a host is up to a third faster or slower: a share carries over, milliseconds do not. A false claim
is one over 3 % where the truth is under 1 %; a missed effect is one over 5 % that was not found, or whose interval
holds zero.

About three minutes a pair with the default times: `--truth 25 --seconds 35` takes a half of that. Name a few folders a
call, and `--merge` the JSON files for the summary of all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from perfdoctor.bench.pair_scripts import Truth, find_pairs, guilty_lines, measure_truth, run_verb
from perfdoctor.bench.pairs import guilty_findings
from perfdoctor.bench.result import conditions_line

_DEFAULT = Path(__file__).resolve().parents[2] / "examples" / "pairs"
_MANY_STEPS = 100_000
_FALSE, _NOTHING, _EFFECT = 0.03, 0.01, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRow:
    """One pair, in ms a step. None: not priced, or refused, with `why`."""

    name: str
    truth: Truth
    codes: str
    replay: float | None
    tried: float | None
    tried_low: float | None
    tried_high: float | None
    run_step: float | None = None  # the bare step of the run that replay speaks of
    trial_step: float | None = None  # the step without any arm on, in the trial
    why: str = ""
    seconds: float = 0.0

    @property
    def truth_ratio(self) -> float:
        return self.truth.saved / self.truth.slow

    @property
    def replay_error(self) -> float | None:
        """What replay said, as a share of the step in its own run, less the true share."""
        return self._error(self.replay, self.run_step)

    @property
    def trial_error(self) -> float | None:
        """What the trial said, as a share of the step in its own run, less the true share."""
        return self._error(self.tried, self.trial_step)

    def _error(self, said: float | None, step: float | None) -> float | None:
        return None if said is None else said / (step or self.truth.slow) - self.truth_ratio

    @property
    def false_claim(self) -> bool:
        """The trial claims over 3 % where there is under 1 %."""
        step = self.trial_step or self.truth.slow
        claimed = self.tried is not None and self.tried / step > _FALSE and (self.tried_low or 0) > 0
        return claimed and self.truth_ratio < _NOTHING

    @property
    def missed(self) -> bool:
        """Over 5 % comes back, and the trial does not say so."""
        return self.truth_ratio > _EFFECT and (self.tried is None or (self.tried_low or 0) <= 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the summary; 1 where there was a false claim, a missed effect, or a pair that failed."""
    options = _parser().parse_args(argv)
    rows = [_loaded(row) for path in options.merge for row in json.loads(path.read_text())]
    pairs = find_pairs(options.folders or ([] if options.merge else [_DEFAULT]))
    if not pairs and not rows:
        named = ", ".join(map(str, options.folders or [_DEFAULT]))
        print(f"no folder with slow.py and fixed.py: {named} (e.g. {_DEFAULT}/several)", file=sys.stderr)
        return 2
    print(_HEAD)
    for row in rows:
        print(format_row(row))
    failed = []
    for pair in pairs:
        try:
            rows.append(measure(pair, options.truth, options.seconds))
            print(format_row(rows[-1]), flush=True)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            failed.append(pair.name)
            print(f"{pair.name:18} FAILED: {error}", flush=True)
        if options.json:  # after each pair: a call that runs out of time keeps what it has
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print("\n".join(summary(rows)))
    print(conditions_line())
    return 1 if failed or any(row.false_claim or row.missed for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench predictions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", default=[])
    parser.add_argument("--json", type=Path, help="write the rows there, after each pair")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="rows of earlier calls")
    parser.add_argument("--truth", type=float, default=30.0, metavar="SECONDS", help="for the truth's blocks (30)")
    parser.add_argument("--seconds", type=float, help="limit of each trial's blocks, as its own option")
    return parser


def measure(pair: Path, truth_seconds: float, seconds: float | None = None) -> PredictionRow:
    """Measure the truth of one pair, then try its slow script."""
    start = time.perf_counter()
    truth = measure_truth(pair, truth_seconds)
    options = [] if seconds is None else ["--seconds", f"{seconds:g}"]
    report = run_verb("trial", pair / "slow.py", _MANY_STEPS, options)
    row = judge(pair.name, truth, report, guilty_lines(pair / "slow.py"))
    return PredictionRow(**{**_fields(row), "seconds": round(time.perf_counter() - start, 1)})


def judge(name: str, truth: Truth, report: dict[str, Any], lines: set[int]) -> PredictionRow:
    """Hold a trial's report against the truth."""
    guilty = [finding for _, finding in guilty_findings(report, lines)]
    rooms = [finding["headroom"] for finding in guilty if finding["headroom"]]
    tried = _tried(report, guilty, lines)
    return PredictionRow(
        name=name,
        truth=truth,
        codes="+".join(dict.fromkeys(finding["code"] for finding in guilty)) or "NOT FOUND",
        replay=sum(room["mid_ms"] for room in rooms) if rooms else None,
        tried=tried["mid_ms"] if tried else None,
        tried_low=tried["low_ms"] if tried else None,
        tried_high=tried["high_ms"] if tried else None,
        run_step=((report.get("verdict") or {}).get("step") or {}).get("median_ms"),
        trial_step=((report.get("trial") or {}).get("base") or {}).get("median_ms"),
        why="" if tried else _why(report, lines),
    )


def _tried(report: dict[str, Any], guilty: list[dict[str, Any]], lines: set[int]) -> dict[str, float] | None:
    """The trial's figure for all guilty lines: of the one, of all together where only they were tried, or the sum."""
    savings = [finding["measured_saving"] for finding in guilty if finding.get("measured_saving")]
    if len(savings) <= 1:
        return savings[0] if savings else None
    arms = (report.get("trial") or {}).get("arms", ())
    single = [arm for arm in arms if arm["code"] is not None]
    innocent = [a for a in single if (a["site"] or {}).get("line") not in lines and a["saving"]["low_ms"] > 0]
    for arm in arms:
        if arm["code"] is None and not innocent:
            saving: dict[str, float] = arm["saving"]
            return saving
    return {key: sum(saving[key] for saving in savings) for key in ("mid_ms", "low_ms", "high_ms")}


def _why(report: dict[str, Any], lines: set[int]) -> str:
    rows = (report.get("trial") or {}).get("refused", ())
    return next((row["why"] for row in rows if row["site"] and row["site"]["line"] in lines), "")


def _fields(row: PredictionRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in PredictionRow.__dataclass_fields__}


def _loaded(row: dict[str, Any]) -> PredictionRow:
    return PredictionRow(**{**row, "truth": Truth(**row["truth"])})


_HEAD = f"{'pair':18}{'slow':>7}{'fixed':>8}  {'measured (95 %)':24}{'replay':>14}{'error':>8}  " \
        f"{'counterfactual (95 %)':34}{'error':>7}  found"  # fmt: skip


def format_row(row: PredictionRow) -> str:
    """One line of the table."""
    truth = row.truth
    measured = f"{truth.saved:6.2f} ({truth.low:.2f} to {truth.high:.2f})"
    interval = "" if row.tried is None else f" ({row.tried_low:.2f} to {row.tried_high:.2f})"
    tried = _of(row.tried, row.trial_step) + interval
    replay = _of(row.replay, row.run_step)
    flag = " FALSE CLAIM" if row.false_claim else " MISSED" if row.missed else ""
    replay_error, tried_error = _percent(row.replay_error), _percent(row.trial_error)
    return (
        f"{row.name:18}{truth.slow:7.2f}{truth.fixed:8.2f}  {measured:24}{replay:>14}{replay_error:>8}  "
        f"{tried:34}{tried_error:>7}  {row.codes}{flag} {row.why}".rstrip()
    )


def _of(said: float | None, step: float | None) -> str:
    return "-" if said is None else f"{said:.2f}" + (f" of {step:.1f}" if step else "")


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:+.1f} %"


def summary(rows: Sequence[PredictionRow]) -> list[str]:
    """Median and worst error of both, false claims, missed effects."""
    lines = []
    for name, key in (("replay", "replay_error"), ("counterfactual", "trial_error")):
        errors = [abs(error) for row in rows if (error := getattr(row, key)) is not None]
        if errors:
            lines.append(
                f"{name}: median error {100 * median(errors):.1f} %, worst {100 * max(errors):.1f} % of the step, "
                f"{len(errors)} of {len(rows)} pairs"
            )
    false = [row.name for row in rows if row.false_claim]
    missed = [row.name for row in rows if row.missed]
    lines.append(f"false claims (> 3 % where < 1 %): {', '.join(false) or 'none'}")
    lines.append(f"missed effects (> 5 %): {', '.join(missed) or 'none'}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
