"""The comparison: the interval against values worked out by hand and by simulation, findings matched, conditions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfdoctor.diagnose.hit_counts import EMULATED
from perfdoctor.report.compare import render_comparison_text, sentence
from perfdoctor.trial.compared_run import ComparedRun, FindingRow
from perfdoctor.trial.comparison import Change, compare

MS = 1_000_000


def _run(median_ms: float, spread_ms: float = 1.0, num_steps: int = 100, **more: Any) -> ComparedRun:
    return ComparedRun(
        path=more.pop("path", "report.json"),
        median_ns=median_ms * MS,
        low_ns=(median_ms - spread_ms / 2) * MS,
        high_ns=(median_ms + spread_ms / 2) * MS,
        num_steps=num_steps,
        basis=more.pop("basis", "bare steps"),
        **more,
    )


def _row(line: int, text: str, **more: Any) -> FindingRow:
    found = {"code": "host-sync", "kind": "item", "title": "reads", "file": "/a/train.py", "function": "main"}
    return FindingRow(**{**found, "line": line, "text": text, "headroom_ns": 2 * MS, **more})


def test_the_interval_is_the_notch_of_the_box_plot() -> None:
    # IQR 1.35 ms and 100 steps: a standard error of 1.25 / 10 = 0.125 ms each, so 1.96 * 0.125 * sqrt(2) = 0.3465 ms.
    found = compare(_run(20, 1.35), _run(18, 1.35), run_noise_ratio=0)
    assert found.difference_ns == pytest.approx(-2 * MS)
    assert found.low_ns == pytest.approx(-2.3465 * MS, rel=1e-4)
    assert found.high_ns == pytest.approx(-1.6535 * MS, rel=1e-4)
    assert found.change is Change.FASTER
    assert found.ratio == pytest.approx(-0.1)


def test_what_processes_differ_by_widens_it() -> None:
    # Without spread inside the runs: 1.96 * 2 % * sqrt(20^2 + 20^2) = 1.109 ms.
    found = compare(_run(20, 0), _run(20, 0), run_noise_ratio=0.02)
    assert found.high_ns == pytest.approx(1.1087 * MS, rel=1e-3)
    assert compare(_run(20, 0), _run(21, 0)).change is Change.NONE
    assert compare(_run(20, 0), _run(21.5, 0)).change is Change.SLOWER


def test_the_gate_needs_both_the_size_and_the_certainty() -> None:
    assert compare(_run(20, 0), _run(22, 0)).exceeds(5)
    assert not compare(_run(20, 0), _run(22, 0)).exceeds(15)
    assert not compare(_run(20, 30, 10), _run(22, 30, 10)).exceeds(5)  # too noisy to say
    assert not compare(_run(22, 0), _run(20, 0)).exceeds(5)


def test_raw_steps_are_used_and_cover_the_truth() -> None:
    """Of 60 pairs of runs with a known difference, drawn anew each time, at least 50 intervals hold it."""
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(60):
        before, after = rng.gamma(50, 0.4, 60) * MS, (rng.gamma(50, 0.4, 60) + 1.5) * MS
        runs = [
            _run(float(np.median(times)) / MS, 1, 60, step_ns=tuple(int(t) for t in times)) for times in (before, after)
        ]
        found = compare(runs[0], runs[1], run_noise_ratio=0)
        assert "bootstrap" in found.rule
        held += found.low_ns <= 1.5 * MS <= found.high_ns
    assert held >= 50


@settings(max_examples=60)
@given(
    median=st.tuples(st.floats(1, 500), st.floats(1, 500)),
    spread=st.tuples(st.floats(0, 20), st.floats(0, 20)),
    steps=st.tuples(st.integers(1, 500), st.integers(1, 500)),
)
def test_swapping_the_runs_swaps_the_answer(
    median: tuple[float, float], spread: tuple[float, float], steps: tuple[int, int]
) -> None:
    a, b = (_run(m, s, n) for m, s, n in zip(median, spread, steps, strict=True))
    there, back = compare(a, b), compare(b, a)
    assert there.low_ns == pytest.approx(-back.high_ns)
    assert there.high_ns == pytest.approx(-back.low_ns)
    assert there.low_ns <= there.difference_ns <= there.high_ns


def test_findings_are_matched_by_code_file_function_and_text() -> None:
    before = (
        _row(84, "running_loss += loss.item()"),
        _row(90, "x = x.to(device)", code="pageable-copy", kind="h2d_pageable"),
        _row(99, "print(acc.item())", function="report"),
    )
    after = (
        _row(80, "print(acc.item())", function="report"),  # moved up
        _row(84, "n = int(mask.sum())", kind="int"),  # another read, at the old line of the first
    )
    found = compare(_run(20, findings=before), _run(18, findings=after))
    assert [row.text for row in found.gone] == ["running_loss += loss.item()", "x = x.to(device)"]
    assert [row.text for row in found.new] == ["n = int(mask.sum())"]
    assert [(m.before.line, m.after.line, m.moved) for m in found.kept] == [(99, 80, True)]
    assert found.predicted_ns == 4 * MS
    assert found.counterfactual_ns is None


def test_a_script_under_another_name_keeps_its_findings() -> None:
    a, b = _row(84, "total += loss.item()", file="/a/slow.py"), _row(86, "total += loss.item()", file="/b/fixed.py")
    found = compare(_run(20, findings=(a,)), _run(20, findings=(b,)))
    assert (found.gone, found.new) == ((), ())
    assert found.kept[0].moved


def test_two_alike_lines_are_told_apart() -> None:
    before = (_row(10, "a = loss.item()"), _row(20, "a = loss.item()"))
    after = (_row(20, "a = loss.item()"),)
    found = compare(_run(20, findings=before), _run(20, findings=after))
    assert [row.line for row in found.gone] == [10]


def test_the_trial_is_summed_only_where_each_was_tried() -> None:
    tried = _row(1, "a.item()", counterfactual_ns=3 * MS)
    untried = _row(2, "b.item().bit_length()")
    assert compare(_run(20, findings=(tried,)), _run(17)).counterfactual_ns == 3 * MS
    assert compare(_run(20, findings=(tried, untried)), _run(17)).counterfactual_ns is None


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-1, 2, "counterfactual 0.50 ms (no difference);"),
        (0, 2, "counterfactual 0.50 ms (no difference);"),
        (0.1, 2, "counterfactual 0.50 ms;"),
        (None, None, "counterfactual 0.50 ms;"),
    ],
)
def test_a_counterfactual_that_claimed_nothing_says_so(low: float | None, high: float | None, said: str) -> None:
    ends = [None if each is None else round(each * MS) for each in (low, high)]
    row = _row(1, "a.item()", counterfactual_ns=MS // 2, counterfactual_low_ns=ends[0], counterfactual_high_ns=ends[1])
    assert said in render_comparison_text(compare(_run(20, findings=(row,)), _run(20)))


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_times_of_an_emulated_device_name_what_can_be_compared(before: bool, after: bool) -> None:
    found = compare(*(_run(20, note_codes=frozenset([EMULATED] * each)) for each in (before, after)))
    assert found.change is Change.UNKNOWN
    assert "perfdoctor trial --format json" in sentence(found)


def test_other_conditions_are_warned_of() -> None:
    a = _run(20, environment={"gpu": "H200", "torch": "2.11"}, samples_per_step=32.0, micro_batches=1.0)
    b = _run(20, num_steps=3, basis="traced steps", samples_per_step=64.0, micro_batches=4.0,
             environment={"gpu": "A100", "torch": "2.11"})  # fmt: skip
    text = "\n".join(compare(a, b).warnings)
    for part in (
        "GPU differs: H200 before, A100 after",
        "32 samples before, of 64 after",
        "micro-batches",
        "only 3 st",
    ):
        assert part in text
    assert "torch" not in text
    assert "traced steps after" in text
    assert compare(a, a).warnings == ()
