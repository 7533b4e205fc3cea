"""How a trial spends the seconds it is given: on simulated hosts, by a clock of their own."""

import random
import time
from collections.abc import Callable

import pytest

from perfdoctor.diagnose.finding import Binding, Diagnosis, Finding, Severity, StepTime
from perfdoctor.trial.clock import BlockClock
from perfdoctor.trial.loader_replay import LoaderReplay
from perfdoctor.trial.neutraliser import Mode, Neutraliser
from perfdoctor.trial.outcome import JOINT, TrialOutcome
from perfdoctor.trial.runner import Limits, Trial
from perfdoctor.trial.suspects import Suspect

STEP_NS = 25_000_000
SECONDS = 60.0


class Knob(Neutraliser):
    """A suspect that takes so many ns of a step."""

    modes = (Mode(name="gone", text="taken out"),)

    def __init__(self, cost_ns: int) -> None:
        super().__init__()
        self.cost_ns = cost_ns


def finding(number: int) -> Finding:
    return Finding(code=f"knob-{number}", severity=Severity.COST, title="a knob", count=1.0)


def spent(
    monkeypatch: pytest.MonkeyPatch,
    costs: list[int],
    noise_ns: float,
    *,
    steps: int = 100_000,
    seconds: float = SECONDS,
    step_ns: int = STEP_NS,
) -> tuple[TrialOutcome, float]:
    """The outcome for a loop with these costs, and the seconds that the trial took by the loop's own clock."""
    now, rng = [0], random.Random(0)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    knobs = [Knob(cost) for cost in costs]
    findings = tuple(finding(number) for number in range(len(costs)))
    suspects = [Suspect(finding=row, neutraliser=knob) for row, knob in zip(findings, knobs, strict=True)]
    step = StepTime(median_ns=step_ns, low_ns=step_ns, high_ns=step_ns, num_steps=10, basis="simulated")
    diagnosis = Diagnosis(
        source="simulated", step=step, accounting=None, binding=Binding.UNKNOWN, findings=findings, leave_alone=()
    )
    elapsed: Callable[[int, int], int] = lambda first, second: second - first  # noqa: E731
    trial = Trial(
        diagnosis,
        suspects,
        LoaderReplay(lambda: None),
        limits=Limits(seconds=seconds, steps=steps),
        clock=BlockClock(elapsed),
    )
    trial.start()
    try:
        while not trial.over:
            now[0] += round(step_ns + abs(rng.gauss(0, noise_ns)))
            now[0] -= sum(knob.cost_ns for knob in knobs if knob.mode)
            trial.step_ended(now[0])
    finally:
        trial.finish()
        monkeypatch.undo()
    return trial.outcome(), now[0] / 1e9


@pytest.mark.parametrize("costs", [[0, 0, 0], [0, 0, 0, 0, 4_000_000], [5_000_000, 4_000_000, 0, 0], [0], [0, 0]])
def test_what_nothing_else_needs_goes_to_the_intervals_that_are_wide(
    monkeypatch: pytest.MonkeyPatch, costs: list[int]
) -> None:
    outcome, seconds = spent(monkeypatch, costs, noise_ns=6e6)
    assert 0.95 * SECONDS <= seconds <= 1.05 * SECONDS
    assert outcome.complete
    found = {arm.finding.code: arm for arm in outcome.arms if arm.finding is not None}
    for number, cost in enumerate(costs):
        saving = found[f"knob-{number}"].saving
        assert saving.low_ns <= cost <= saving.high_ns or abs(saving.median_ns - cost) < 0.02 * STEP_NS
        assert saving.significant == (cost > 0)


def test_the_first_few_fixes_are_still_tried_together(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, _ = spent(monkeypatch, [4_000_000, 3_000_000, 0, 0], noise_ns=4e6)
    assert any(arm.mode.startswith(JOINT) for arm in outcome.arms)


def test_a_quiet_loop_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, seconds = spent(monkeypatch, [0, 0, 2_000_000], noise_ns=1e4)
    assert seconds < 0.6 * SECONDS
    assert outcome.complete


def test_steps_are_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, _ = spent(monkeypatch, [0, 0, 0], noise_ns=6e6, steps=700)
    assert outcome.num_steps <= 700
    assert outcome.complete


@pytest.mark.parametrize("num_knobs", [1, 2, 4])
@pytest.mark.parametrize("seconds", [1.0, 4.0, 12.0])
def test_where_too_few_rounds_fit_it_says_what_would_do(
    monkeypatch: pytest.MonkeyPatch, num_knobs: int, seconds: float
) -> None:
    slow, _ = spent(monkeypatch, [0] * num_knobs, 0.0, seconds=seconds, step_ns=400_000_000)
    assert max((arm.num_pairs for arm in slow.arms), default=0) < 6
    note = next(note for note in slow.notes if "too few" in note)
    assert f"{seconds:g} s are too few for steps of 400 ms" in note
    wanted = float(note.split("--seconds ")[1].split()[0])
    enough, _ = spent(monkeypatch, [0], 0.0, seconds=wanted, step_ns=400_000_000)
    assert enough.arms[0].num_pairs >= 6
    assert not [note for note in enough.notes if "too few" in note]


def test_where_too_few_steps_are_allowed_it_says_how_many_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    few, _ = spent(monkeypatch, [0], 0.0, steps=12)
    note = next(note for note in few.notes if "too few" in note)
    enough, _ = spent(monkeypatch, [0], 0.0, steps=int(note.split("--steps ")[1].split()[0]))
    assert enough.arms[0].num_pairs >= 6
