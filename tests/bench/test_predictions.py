"""The score of predictions: the pairs themselves, the truth by alternation in one process, the judging."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perfdoctor.bench.pair_scripts import Truth, find_pairs, guilty_lines, measure_truth, truth_of
from perfdoctor.bench.pairs import guilty_findings
from perfdoctor.bench.predictions import PredictionRow, judge, main, summary

ROOT = Path(__file__).resolve().parents[2]
PAIRS = sorted(path.parent for path in (ROOT / "examples" / "pairs").glob("*/slow.py"))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_pair_differs_in_its_guilty_lines_and_what_they_need(pair: Path) -> None:
    slow, fixed = ((pair / name).read_text().splitlines() for name in ("slow.py", "fixed.py"))
    assert guilty_lines(pair / "slow.py")
    assert not guilty_lines(pair / "fixed.py")
    assert "perfdoctor" not in "".join(slow)
    changed = [line for line in difflib.ndiff(slow, fixed) if line.startswith("- ")]
    assert len(changed) <= 5
    gone = {number for number, line in enumerate(slow, 1) if f"- {line}" in changed}
    assert guilty_lines(pair / "slow.py") <= gone
    for text in (slow, fixed):
        compile("\n".join(text), str(pair), "exec")


@pytest.fixture
def sleepy(tmp_path: Path) -> Path:
    """A pair for the CPU: the slow script sleeps 4 ms a step more than the fixed one."""
    head = (
        "import os, time, torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(int(os.environ['STEPS'])):\n"
        "    model(torch.ones(2, 8)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    time.sleep(0.002)\n"
    )
    folder = tmp_path / "sleepy"
    folder.mkdir()
    (folder / "slow.py").write_text(head + "    time.sleep(0.004)  # GUILTY: sleep\n")
    (folder / "fixed.py").write_text(head)
    return folder


def test_alternation_finds_a_known_difference(sleepy: Path) -> None:
    truth = measure_truth(sleepy, seconds=0.5)
    assert truth.num_pairs >= 6
    assert truth.low <= truth.saved <= truth.high
    assert 3.9 < truth.saved < 8  # a sleep lasts at least as long as asked; how much longer is the machine's affair
    assert truth.slow > truth.fixed > 2


def test_drifts_cancel_and_hiccups_are_cut() -> None:
    drift = [30.0 + 0.5 * at for at in range(41)]  # of both, block by block
    slow, fixed = drift[::2], [each - 4 for each in drift[1::2]]
    truth = truth_of(slow, fixed, 4)
    assert (truth.saved, truth.low, truth.high, truth.num_pairs) == (
        pytest.approx(4),
        pytest.approx(4),
        pytest.approx(4),
        20,
    )
    fixed[3] += 500  # one pair of twenty: two at each end are cut
    assert truth_of(slow, fixed, 4).saved == pytest.approx(4)


def test_what_comes_in_every_fourth_block_counts() -> None:
    fixed = [20.0] * 40
    slow = [20.0] * 41
    for at in range(1, 40, 4):
        slow[at] += 8  # 2 ms on average
    assert truth_of(slow, fixed, 4).saved == pytest.approx(2, abs=0.6)


def test_a_script_that_fails_is_said(sleepy: Path) -> None:
    (sleepy / "fixed.py").write_text("raise ValueError('planned')\n")
    with pytest.raises(RuntimeError, match="planned"):
        measure_truth(sleepy, seconds=0)


def test_pairs_are_found_by_folder_and_by_name(sleepy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_pairs([sleepy]) == find_pairs([sleepy.parent]) == find_pairs([sleepy, sleepy.parent]) == [sleepy]
    (sleepy / "fixed.py").unlink()
    assert find_pairs([sleepy.parent]) == []
    assert main([str(sleepy)]) == 2
    assert "no folder" in capsys.readouterr().err


def _finding(line: int, mid: float | None, tried: float | None = None, code: str = "host-sync") -> dict[str, Any]:
    room = None if mid is None else {"low_ms": mid - 1, "mid_ms": mid, "high_ms": mid + 1}
    saving = None if tried is None else {"low_ms": tried - 0.5, "mid_ms": tried, "high_ms": tried + 0.5}
    return {"code": code, "site": {"line": line}, "headroom": room, "measured_saving": saving}


def _report(findings: list[dict[str, Any]], **trial: Any) -> dict[str, Any]:
    return {"findings": findings, "leave_alone": [], "trial": {"arms": [], "refused": [], **trial}}


def _truth(saved: float, slow: float = 50.0) -> Truth:
    return Truth(slow=slow, fixed=slow - saved, saved=saved, low=saved, high=saved, num_pairs=12, num_steps=10)


def test_the_dearer_finding_speaks_for_its_line() -> None:
    report = _report([_finding(7, 1.0), _finding(7, 3.0, code="gradient-loop"), _finding(9, 8.0)])
    assert [(rank, f["code"]) for rank, f in guilty_findings(report, {7})] == [(2, "gradient-loop")]


def test_one_guilty_line_is_judged_by_its_own_figure() -> None:
    row = judge("a", _truth(10), _report([_finding(9, 4.0, 4.0), _finding(7, 12.0, 10.5)]), {7})
    assert (row.replay, row.tried) == (12.0, 10.5)
    assert row.replay_error == pytest.approx(0.04)
    assert row.trial_error == pytest.approx(0.01)
    assert not row.missed
    assert not row.false_claim


def test_what_is_said_is_a_share_of_the_step_in_its_own_run() -> None:
    report = _report([_finding(7, 15.0, 12.0)], base={"median_ms": 60.0})
    row = judge("a", _truth(10), {**report, "verdict": {"step": {"median_ms": 100.0}}}, {7})
    assert row.replay_error == pytest.approx(0.15 - 0.2)  # 15 of 100 ms, in truth 10 of 50
    assert row.trial_error == pytest.approx(0.0)  # 12 of 60


def test_several_guilty_lines_are_judged_together() -> None:
    findings = [_finding(7, 6.0, 6.0), _finding(9, 6.0, 6.0)]
    together = {"code": None, "site": None, "saving": {"mid_ms": 9.0, "low_ms": 8.0, "high_ms": 10.0}}
    assert judge("a", _truth(9), _report(findings, arms=[together]), {7, 9}).tried == 9.0
    some = {"mid_ms": 1.0, "low_ms": 0.5, "high_ms": 1.5}
    # Something innocent gives back too, so that all together is more than the guilty: their sum.
    for site in ({"line": 3}, None):
        other = {"code": "launch-bound", "site": site, "saving": some}
        assert judge("a", _truth(9), _report(findings, arms=[other, together]), {7, 9}).tried == 12.0


def test_false_claims_and_missed_effects() -> None:
    nothing = judge("nothing", _truth(0.2), _report([_finding(7, 0.0, 2.0)]), {7})
    assert nothing.false_claim
    quiet = judge("quiet", _truth(0.2), _report([_finding(7, 0.0, 0.3)]), {7})
    assert not quiet.false_claim
    refused = [{"site": {"line": 7}, "why": "control flow depends on it"}]
    missed = judge("missed", _truth(5), _report([_finding(7, 5.0)], refused=refused), {7})
    assert missed.missed
    assert missed.why == "control flow depends on it"
    absent = judge("absent", _truth(5), _report([]), {7})
    assert absent.missed
    assert absent.codes == "NOT FOUND"
    lines = "\n".join(summary([nothing, quiet, missed, absent]))
    assert "false claims (> 3 % where < 1 %): nothing" in lines
    assert "missed effects (> 5 %): missed, absent" in lines
    assert "counterfactual: median error 1.9 %, worst 3.6 %" in lines  # (0.2 and 3.6) / 2, of 50 ms


def test_rows_of_earlier_calls_are_merged(tmp_path: Path) -> None:
    from dataclasses import asdict

    row = PredictionRow(name="a", truth=_truth(5), codes="x", replay=5.0, tried=5.0, tried_low=4.0, tried_high=6.0)
    (tmp_path / "rows.json").write_text(json.dumps([asdict(row)]))
    command = [sys.executable, "-m", "perfdoctor.bench.predictions", "--merge", str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "worst 0.0 % of the step, 1 of 1 pairs" in done.stdout
