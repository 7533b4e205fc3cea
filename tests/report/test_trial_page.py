"""The page of a trial: ranked, and ending in what to change."""

from dataclasses import replace

import pytest

from perfdoctor.diagnose.finding import Advice, Binding, Diagnosis, Finding, Saving, Severity, StepTime
from perfdoctor.record.capture import Frame, Site
from perfdoctor.report.trial import render_trial, saving_text, trial_document
from perfdoctor.trial.outcome import ArmResult, TrialOutcome

MS = 1_000_000


def finding(line: int) -> Finding:
    site = Site(frame=Frame(file="train.py", line=line, function="", owner="user"), text=f"x = y{line}.item()")
    advice = Advice(text=f"change {line}", lines=(f"new line {line}",))
    return Finding(
        code="host-sync", severity=Severity.COST, title="reads", kind="item", site=site, count=1.0, advice=advice
    )


def arm(row: Finding | None, mode: str, mid: float, half: float, *, prediction: bool = True) -> ArmResult:
    saving = Saving(
        median_ns=round(mid * MS), low_ns=round((mid - half) * MS), high_ns=round((mid + half) * MS), basis=""
    )
    return ArmResult(finding=row, mode=mode, text=f"text {mode}", prediction=prediction, saving=saving, num_pairs=20)


ROWS = (finding(3), finding(7))
OUTCOME = TrialOutcome(
    diagnosis=Diagnosis(
        source="train.py", step=None, accounting=None, binding=Binding.UNKNOWN, findings=ROWS, leave_alone=()
    ),
    base_ns=50 * MS,
    arms=(
        arm(ROWS[0], "gone", 2.0, 0.2),
        arm(ROWS[1], "gone", 10.0, 0.5),
        arm(None, "all", 12.0, 0.5),
        arm(ROWS[0], "every", 1.0, 2.0, prediction=False),
    ),
    order=(ROWS[1], ROWS[0]),
)


def test_the_dearest_comes_first_and_a_bound_under_its_finding() -> None:
    page = " ".join(render_trial(OUTCOME).split())
    assert (
        page.index("train.py:7") < page.index("train.py:3") < page.index("text every: a bound") < page.index("text all")
    )
    # 1 + 2 of 50 ms
    assert "a bound: no difference (less than 6 % of the step); no prediction of a fix" in page


WAIT = Finding(
    code="data-wait", severity=Severity.COST, title="waits for the next batch", kind="dataloader_wait", count=1.0,
    advice=Advice(text="give it workers", lines=("loader = DataLoader(..., num_workers=1)",)),
)  # fmt: skip


@pytest.mark.parametrize("prediction", [True, False])
def test_a_loader_on_trial_is_a_bound_and_promised_nowhere(prediction: bool) -> None:
    """Its batches are there already on trial; workers may even be slower than what they replace."""
    waiting = replace(
        OUTCOME,
        arms=(
            arm(WAIT, "gone", 20.0, 0.5, prediction=prediction),
            arm(ROWS[1], "gone", 10.0, 0.5),
            arm(None, "all", 30.0, 0.5),
            arm(None, "first 2", 30.0, 0.5),
        ),
        order=(WAIT, ROWS[1]),
    )
    page = render_trial(waiting, script="'my dir/train.py' --steps 9")
    flat = " ".join(page.split())
    assert "a bound: at most 20.0 ms (19.5 to 20.5 ms), 40 % of the step; no prediction of a fix" in flat
    assert "gives back 20" not in flat
    ending = flat.split("Fix in this order")[1]
    assert ending.index("the whole step") < ending.index("give it workers") < ending.index("train.py:7")
    assert "--treat=prefetch,dataloader_workers 'my dir/train.py' --steps 9" in ending
    assert "train.py:7 gives back 10.0 ms" in ending  # what the fix gives stays a promise
    arms = trial_document(waiting)["arms"]
    assert [row["prediction"] for row in arms][:2] == [False, True]
    if prediction:  # it is one of those that were off together
        assert "gives back 30" not in flat
        assert ending.count("a bound: at most 30.0 ms (29.5 to 30.5 ms), 60 % of the step; no prediction of a fix") == 2


def test_a_step_that_a_few_long_ones_make_up_is_told_from_the_median_one() -> None:
    step = StepTime(median_ns=MS, low_ns=MS, high_ns=2 * MS, num_steps=10, basis="bare steps by the host's clock")
    page = render_trial(replace(OUTCOME, diagnosis=replace(OUTCOME.diagnosis, step=step)))
    assert "50.0 ms a step with nothing taken out (mean of a block; the median step" in " ".join(page.split())
    same = replace(step, median_ns=48 * MS, low_ns=47 * MS, high_ns=50 * MS)
    assert "mean of a block" not in render_trial(replace(OUTCOME, diagnosis=replace(OUTCOME.diagnosis, step=same)))


def test_one_of_a_thing_is_said_in_the_singular() -> None:
    one = replace(OUTCOME, num_steps=1, rounds=1, counted=1, left_out=1)
    page = " ".join(render_trial(one).split())
    assert "1 step, 1 round of blocks of 1 step, 95 % intervals" in page
    assert "1 more finding was not tried" in page
    page = " ".join(render_trial(replace(one, num_steps=40, rounds=2, counted=5, left_out=2)).split())
    assert "40 steps, 2 rounds of blocks of 5 steps, 95 % intervals" in page
    assert "2 more findings were not tried" in page


def test_it_ends_in_the_order_with_the_lines_to_change() -> None:
    ending = render_trial(OUTCOME).split("Fix in this order\n")[1]
    assert ending.index("train.py:7") < ending.index("new line 7") < ending.index("train.py:3")
    assert ending.index("train.py:3") < ending.index("new line 3") < ending.index("All together: gives back 12")
    assert "gives back 10" in ending.split("\n")[0]


def test_where_nothing_is_sure_it_says_whether_that_settles_it() -> None:
    calm = replace(OUTCOME, order=(), arms=(arm(ROWS[0], "gone", 0.1, 0.3),))
    assert "leave these lines alone" in render_trial(calm)
    noisy = replace(OUTCOME, order=(), arms=(arm(ROWS[0], "gone", 0.1, 4.9),))
    assert "the noise may hide 10 %" in render_trial(noisy)
    assert "could be tried" in render_trial(replace(OUTCOME, order=(), arms=()))


def test_a_saving_in_words() -> None:
    saving = Saving(median_ns=10 * MS, low_ns=9 * MS, high_ns=11 * MS, basis="")
    assert saving_text(saving, 50 * MS).endswith("20 % of the step")
    assert "more without it" in saving_text(Saving(median_ns=-MS, low_ns=-2 * MS, high_ns=-1, basis=""), 50 * MS)


def test_too_few_blocks_decide_nothing() -> None:
    few = replace(arm(ROWS[0], "gone", 0.0, 0.1), num_pairs=5)
    page = render_trial(replace(OUTCOME, arms=(few,), order=()))
    assert "Not decided" in page
    assert "leave these lines alone" not in page


@pytest.mark.parametrize("parts", [(), ("arms",), ("notes",), ("arms", "notes")])
def test_parts_are_one_blank_line_apart_whichever_there_are(parts: tuple[str, ...]) -> None:
    given = {"arms": OUTCOME.arms, "order": (), "notes": ("a note",)}
    page = render_trial(replace(OUTCOME, **{name: given[name] if name in parts else () for name in given}))
    assert "\n\n\n" not in page
    assert not page.startswith("\n")
