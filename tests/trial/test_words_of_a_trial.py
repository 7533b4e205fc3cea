"""What a trial says of a mode is said in a user's words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perfdoctor.diagnose.finding import Binding, Diagnosis, Finding, Saving, Severity
from perfdoctor.report.trial import render_trial
from perfdoctor.trial.arms import Arm, name_of
from perfdoctor.trial.neutral_copy import GONE as COPY_GONE
from perfdoctor.trial.neutral_copy import MADE_ONCE, PINNED
from perfdoctor.trial.neutral_read import GONE, SPARSE
from perfdoctor.trial.neutraliser import Mode
from perfdoctor.trial.outcome import ArmResult, TrialOutcome


@pytest.mark.parametrize("mode", [GONE, SPARSE, COPY_GONE, MADE_ONCE, PINNED])
def test_an_arm_is_named_by_what_is_done_not_by_the_name_of_its_mode(mode: Mode) -> None:
    finding = Finding(code="host-sync", severity=Severity.COST, title="reads a device value")
    assert name_of(Arm(finding=finding, mode=mode, switches=())) == f"host-sync ({mode.text})"


def _outcome(**changes: Any) -> TrialOutcome:
    diagnosis = Diagnosis(
        source="train.py", step=None, accounting=None, binding=Binding.UNKNOWN, findings=(), leave_alone=()
    )
    return replace(TrialOutcome(diagnosis=diagnosis, base_ns=10_000_000, counted=4, num_steps=100), **changes)


def _arm(finding: Finding | None, saving: tuple[int, int, int], num_pairs: int, mode: str = "gone") -> ArmResult:
    low, mid, high = saving
    figures = Saving(median_ns=mid, low_ns=low, high_ns=high, basis="")
    return ArmResult(finding=finding, mode=mode, text="x", prediction=True, saving=figures, num_pairs=num_pairs)


FINDING = Finding(code="host-sync", severity=Severity.COST, title="reads a device value")


def test_too_few_pairs_are_not_called_no_difference() -> None:
    text = render_trial(_outcome(arms=(_arm(FINDING, (-9_000_000, 4_000_000, 17_000_000), 2),)))
    assert "not decided: only 2 pairs of blocks" in text
    assert "no difference" not in text


@pytest.mark.parametrize(("complete", "advice"), [(True, "Give it more --seconds"), (False, "Let it run longer")])
def test_what_to_do_where_nothing_was_decided(complete: bool, advice: str) -> None:
    arms = (_arm(FINDING, (-9_000_000, 4_000_000, 17_000_000), 2),)
    assert advice in render_trial(_outcome(arms=arms, complete=complete))


def test_a_gain_of_all_together_is_not_nothing() -> None:
    arms = (_arm(FINDING, (-100_000, 100_000, 200_000), 40), _arm(None, (200_000, 300_000, 400_000), 40, "all"))
    text = render_trial(_outcome(arms=arms))
    assert "all together: gives back 0.30 ms (0.20 to 0.40 ms), 3 % of the step" in " ".join(text.split())
    assert "Nothing" not in text


def test_a_loop_in_which_nothing_was_found_says_so() -> None:
    text = render_trial(_outcome(base_ns=0, num_steps=8))
    assert "Nothing to try" in text
    assert "0 rounds" not in text
