"""Verdicts as a page and as JSON, against the published schema."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import pytest

from perfdoctor.diagnose.finding import Diagnosis, StepTime
from perfdoctor.report.verdicts import best_of, ranked, render_verdicts, render_verdicts_json, verdicts_schema
from perfdoctor.trial.estimate import Estimate
from perfdoctor.trial.parity import NOT_COMPARED, Allowed, Parity, judge_parity
from perfdoctor.trial.verdict import SPENT, SpeedUp, Verdict, failed, refused, untried

MS = 1_000_000
SAME = Parity(kept=True, text="losses equal bit for bit", difference=0.0, repeat=0.0, num_losses=8)


def _step(ms: float) -> StepTime:
    ns = round(ms * MS)
    return StepTime(median_ns=ns, low_ns=ns - MS, high_ns=ns + MS, num_steps=48, basis="6 blocks of 8 steps")


def _verdict(name: str, saved_ms: float, accepted: bool, reason: str = "faster", **more: Any) -> Verdict:
    saving = Estimate(mid_ns=saved_ms * MS, low_ns=(saved_ms - 0.5) * MS, high_ns=(saved_ms + 0.5) * MS, num_pairs=6)
    return Verdict(
        treatment=name, accepted=accepted, reason=reason, parity=SAME, before=_step(20), after=_step(20 - saved_ms),
        speed_up=SpeedUp.of(saving, 20 * MS), saving=saving, lines=(f"line of {name}",) if accepted else (), **more,
    )  # fmt: skip


SMALL = _verdict("prefetch", 4, True, peak_memory_before_bytes=10**9, peak_memory_after_bytes=11 * 10**8)
LARGE = _verdict("fused_optimizer", 10, True)
BOTH = _verdict("fused_optimizer + prefetch", 12, True)
SLOWER = _verdict("our_clip", -2, False, "slower")
ALL = (refused("tf32", "no such device"), SLOWER, SMALL, LARGE, failed("compile", MemoryError("planned")), BOTH)


def _check(verdicts: tuple[Verdict, ...], diagnosis: Diagnosis) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(render_verdicts_json(verdicts, diagnosis, notes=("a note",)))
    jsonschema.validate(document, verdicts_schema(), cls=jsonschema.Draft202012Validator)
    return document


def test_ranked_by_what_they_save_then_timed_then_the_rest() -> None:
    names = [verdict.treatment for verdict in ranked(ALL)]
    assert names == ["fused_optimizer + prefetch", "fused_optimizer", "prefetch", "our_clip", "tf32", "compile"]
    assert best_of(ALL) is BOTH
    assert best_of((SLOWER,)) is None


def test_the_page_is_ranked_and_ends_with_the_lines_of_the_best(diagnosis: Diagnosis) -> None:
    page = render_verdicts(ALL, diagnosis, notes=("files were deleted",))
    order = ["1  fused_optimizer", "2  prefetch", "Together: ", "Not to keep", "files were deleted", "Lines to change"]
    places = [page.index(each) for each in order]
    assert places == sorted(places)
    assert page.endswith("   line of fused_optimizer + prefetch\n")
    # 20 ms less 10 ms is twice as fast; less 9.5 and 10.5 ms: 20 / 10.5 and 20 / 9.5.
    assert "2.00x (1.90x to 2.11x)" in page
    assert "20.0 ms -> 10.0 ms, saves 10.0 ms (9.5 to 10.5 ms)" in page
    assert "1 GB -> 1.1 GB, +10.0 %" in page
    assert "slower, by 2.0 ms (1.5 to 2.5 ms)" in page
    assert "no such device" in page[page.index("Does not fit this loop\n") :]
    assert "failed: MemoryError: planned" in page
    assert max(map(len, page.splitlines())) <= 100


def test_what_a_treatment_is_for_stands_beside_what_replay_had_predicted(diagnosis: Diagnosis) -> None:
    page = render_verdicts((SMALL,), diagnosis)
    assert "pageable-copy; replay had predicted 1.3 ms for it" in page
    (row,) = _check((SMALL,), diagnosis)["verdicts"]
    assert {cure["code"]: cure["predicted_ms"] for cure in row["cures"]}["pageable-copy"] == 1.3


def test_nothing_faster_is_said(diagnosis: Diagnosis) -> None:
    page = render_verdicts((SLOWER, untried("compile", "the script ended first")), diagnosis)
    assert page.endswith("Nothing to change so far: of 1 treatment tried none is to be kept; 1 not decided.\n")
    assert "To go on" not in page
    page = render_verdicts((SLOWER,), diagnosis)
    assert page.endswith("Nothing to change: of 1 treatment tried none is to be kept.\n")
    document = _check((SLOWER,), diagnosis)
    assert (document["best"], document["lines"]) == (None, [])


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ((refused("tf32", "no such device"),), "Nothing was tried: none of these treatments fits this loop."),
        ((untried("tf32", SPENT),), "Nothing was decided: no treatment was tried to the end (1 not decided)."),
        (
            (untried("tf32", SPENT), untried("compile", SPENT), refused("prefetch", "no such device")),
            "Nothing was decided: no treatment was tried to the end (2 not decided, 1 not fit for this loop).",
        ),
    ],
)
def test_where_nothing_was_tried_no_treatment_is_said_to_have_failed(
    diagnosis: Diagnosis, verdicts: tuple[Verdict, ...], said: str
) -> None:
    page = " ".join(render_verdicts(verdicts, diagnosis).split())
    assert page.endswith(said)
    assert "none was timed" in page
    assert "faster" not in page
    assert "Not to keep" not in page


def test_a_reason_that_several_treatments_share_is_said_once(diagnosis: Diagnosis) -> None:
    page = render_verdicts(tuple(untried(name, SPENT) for name in ("tf32", "compile", "prefetch")), diagnosis)
    assert page.count(SPENT) == 1
    assert "   tf32, compile, prefetch: not tried: " in page


def test_what_the_time_did_not_suffice_for_gets_a_command_that_names_the_script(diagnosis: Diagnosis) -> None:
    few = _verdict("pin_memory", 3, False, "only 2 pairs of processes fitted into the time: not decided")
    late = (SMALL, few, untried("compile + prefetch", SPENT), untried("tf32", "the script ended first"))
    page = render_verdicts(late, diagnosis, again=lambda names: f"try {' '.join(names)} on train.py")
    assert "   try pin_memory compile prefetch on train.py\n" in page
    assert page.endswith("   line of prefetch\n")  # the lines to change come last
    command = "trial --treat=pin_memory,compile,prefetch SCRIPT.py"  # where no command is given
    assert command in render_verdicts(late, diagnosis)
    assert _check(late, diagnosis)["again"].endswith(command)
    assert _check((SMALL,), diagnosis)["again"] is None


def test_processes_are_told_with_their_number_and_why(diagnosis: Diagnosis) -> None:
    apart: dict[str, Any] = {"num_processes": 13, "why_processes": "cuDNN keeps its choice"}
    page = render_verdicts((_verdict("cudnn_benchmark", 4, True, **apart), SLOWER), diagnosis)
    assert "1 timed in blocks of steps with and without in turn, 1 in processes of their own" in page
    assert "processes      13 processes of 8 steps: cuDNN keeps its choice" in page
    rejected = _verdict("cudnn_benchmark", 0, False, "no difference: the interval holds zero", **apart)
    page = " ".join(render_verdicts((rejected,), diagnosis).split())
    assert "(-0.50 to 0.50 ms saved); 13 processes of 8 steps: cuDNN keeps its choice" in page
    (row,) = _check((rejected,), diagnosis)["verdicts"]
    assert (row["num_processes"], row["why_processes"]) == (13, "cuDNN keeps its choice")


def test_the_lines_say_where_they_go(diagnosis: Diagnosis) -> None:
    page = render_verdicts((SMALL,), diagnosis)
    places = [f.site.frame.line for f in diagnosis.findings if f.site and f.code in ("pageable-copy", "data-wait")]
    ending = page[page.index("Lines to change") :]
    assert places
    assert all(f":{line}" in ending for line in places)


def test_a_rejected_set_leaves_the_best_single_one(diagnosis: Diagnosis) -> None:
    rejected = _verdict("fused_optimizer + prefetch", 1, False, "no difference: the interval holds zero")
    page = render_verdicts((SMALL, LARGE, rejected), diagnosis)
    assert "not to keep: no difference" in page
    assert page.endswith("   line of fused_optimizer\n")


@pytest.mark.parametrize("left", [(), (failed(BOTH.treatment, RuntimeError("a worker")),)])
def test_what_was_never_timed_together_is_told_one_by_one(diagnosis: Diagnosis, left: tuple[Verdict, ...]) -> None:
    page = render_verdicts((SMALL, LARGE, *left), diagnosis)
    ending = page[page.index("Lines to change (fused_optimizer") :].splitlines()[1:]
    assert ending[-3:] == [
        "   line of fused_optimizer", "   prefetch, alone; not measured together:", "   line of prefetch",
    ]  # fmt: skip


def test_json_follows_the_schema_and_has_no_infinities(diagnosis: Diagnosis) -> None:
    jsonschema.Draft202012Validator.check_schema(verdicts_schema())
    whole = Estimate(mid_ns=19.9 * MS, low_ns=19 * MS, high_ns=21.0 * MS, num_pairs=6)
    endless = _verdict("magic", 1, False)
    endless = Verdict(
        treatment="magic", accepted=True, reason="faster", before=endless.before, after=endless.after, saving=whole,
        speed_up=SpeedUp.of(whole, 20 * MS), parity=judge_parity([[1.0], [1.0]], [math.nan], Allowed()),
    )  # fmt: skip
    document = _check((*ALL, endless), diagnosis)
    row = next(row for row in document["verdicts"] if row["treatment"] == "magic")
    assert row["speed_up"]["high"] is None
    assert row["parity"]["difference"] is None
    assert ">99x" in render_verdicts((endless,), diagnosis)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "kind": "other"}, verdicts_schema())
    assert NOT_COMPARED.kept is None
