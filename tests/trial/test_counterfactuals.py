"""Suspects of a real loop on the emulated device, switched off and on, timed by a clock that counts crossings."""

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import suspect_trials
import torch
from suspect_trials import STALL, STEP, Loop, diagnosis, saving, tried

from perfdoctor.diagnose.finding import Finding, Saving
from perfdoctor.report.trial import TrialReport
from perfdoctor.trial.arms import fix_order
from perfdoctor.trial.outcome import ArmResult, TrialOutcome

finding, line_of = partial(suspect_trials.finding, __file__), partial(suspect_trials.line_of, __file__)


def test_reads_of_a_line_are_answered_each_with_its_own_value(device: Any) -> None:
    loop = Loop()

    def step(number: int) -> None:
        loop.train(loop.pool[0].cuda(), lambda loss: (loss.item(), (loss * 2).item()))  # two reads

    outcome = tried(device, loop, step, finding("two reads", "host-sync", "item"))
    assert outcome.complete
    assert outcome.base_ns == STEP + 3 * STALL  # the copy stays
    assert saving(outcome, "gone") == (2 * STALL, 2 * STALL, 2 * STALL)
    assert saving(outcome, "every") == (180, 180, 180)  # nine of ten
    assert all(second == pytest.approx(2 * first) for first, second in loop.seen)
    assert outcome.result_of(outcome.diagnosis.findings[0]) is outcome.arms[0]
    assert outcome.diagnosis.findings[0].measured_saving == outcome.arms[0].saving


def test_every_kind_of_read_is_answered(device: Any) -> None:
    loop = Loop()

    def reads(loss: torch.Tensor) -> tuple[Any, ...]:
        t = loss.detach()
        return t.cpu(), float(t), f"{t:.2f}", t.tolist(), bool(t), str(t), t.to("cpu"), t.cpu().numpy()  # kinds

    outcome = tried(
        device, loop, lambda n: loop.train(loop.pool[0].cuda(), reads), finding("kinds", "host-sync", "item")
    )
    assert saving(outcome, "gone")[0] == outcome.base_ns - STEP - STALL  # all but the copy to the device
    assert outcome.base_ns >= STEP + 9 * STALL
    for read in loop.seen:
        assert read[0] == pytest.approx(read[1]) == pytest.approx(read[3]) == pytest.approx(float(read[7]))
        assert read[2] == f"{read[1]:.2f}"
        assert read[4] is True


def test_a_value_that_decides_is_not_answered(device: Any) -> None:
    loop = Loop()
    best = [1e9]

    def watch(loss: torch.Tensor) -> float:
        value = loss.item()  # decides
        if value < best[0]:
            best[0] = value
            gc.isenabled()
        return value

    outcome = tried(
        device, loop, lambda n: loop.train(loop.pool[n % 4].cuda(), watch), finding("decides", "host-sync", "item")
    )
    assert not outcome.arms
    assert "cannot be neutralised safely" in outcome.refused[0].why
    assert f"line {line_of('decides') + 1}" in outcome.refused[0].why


def test_what_is_refused_takes_no_room_from_others(device: Any) -> None:
    loop = Loop()

    def watch(loss: torch.Tensor) -> float:
        if loss.item() < loop.steps % 2:  # turned down
            gc.isenabled()
        return (loss * 2).item() + (loss * 3).item()  # crowd

    dear, cheap = finding("turned down", "host-sync", "item"), finding("crowd", "host-sync", "item")
    outcome = tried(device, loop, lambda n: loop.train(loop.pool[0].cuda(), watch), dear, cheap, room=1)
    assert [row.finding for row in outcome.refused] == [dear]
    assert saving(outcome, "gone")[0] == 2 * STALL
    assert outcome.left_out == 0


def test_what_could_be_tried_beyond_the_room_is_counted(device: Any) -> None:
    loop = Loop()

    def reads(loss: torch.Tensor) -> float:
        first = loss.item()  # first of two
        return first + (loss * 2).item()  # second of two

    both = finding("first of two", "host-sync", "item"), finding("second of two", "host-sync", "item")
    outcome = tried(device, loop, lambda n: loop.train(loop.pool[0].cuda(), reads), *both, room=1)
    assert {row.finding for row in outcome.arms} == {both[0]}
    assert outcome.left_out == 1
    assert not outcome.refused


def test_a_test_that_never_changed_may_be_answered(device: Any) -> None:
    loop = Loop()

    def watch(loss: torch.Tensor) -> None:
        if loss.isnan():  # never
            raise RuntimeError("NaN")

    outcome = tried(
        device, loop, lambda n: loop.train(loop.pool[0].cuda(), watch), finding("never", "host-sync", "tensor_to_bool")
    )
    assert saving(outcome, "gone")[0] == STALL


def test_two_suspects_alone_and_together_in_the_order_of_what_they_give(device: Any) -> None:
    loop = Loop()

    def step(number: int) -> None:
        loop.train(loop.pool[0].cuda(), lambda t: (t.item(), 1))  # single
        loop.seen.append((loop.optimizer.param_groups, [p.mean().item() for p in loop.model.parameters()]))  # four

    outcome = tried(
        device, loop, step, finding("single", "host-sync", "item"), finding("four", "host-sync", "item"),
        finding("", "fusion", "fusion"),
    )  # fmt: skip
    gone = [arm.saving.median_ns for arm in outcome.arms if arm.mode == "gone"]
    assert gone == [STALL, 4 * STALL]
    assert outcome.together is not None
    assert outcome.together.saving.median_ns == 5 * STALL
    assert [f.site.text for f in outcome.order if f.site] == ["four", "single"]
    assert [(row.finding.code, "train_step" in row.why) for row in outcome.refused] == [("fusion", True)]


def test_the_first_fixes_are_tried_together_too(device: Any) -> None:
    loop = Loop()

    def step(number: int) -> None:
        loop.train(loop.pool[0].cuda(), lambda t: (t.item(), 1))  # cheap
        loop.seen.append([t.item() for t in (loop.model[0].bias[:1], loop.model[0].bias[:1])])  # medium
        loop.seen.append([p.mean().item() for p in loop.model.parameters()])  # dear

    outcome = tried(
        device, loop, step, *(finding(name, "host-sync", "item") for name in ("cheap", "medium", "dear")), steps=3000
    )
    joint = next(arm for arm in outcome.arms if arm.mode == "first 2")
    assert joint.saving.median_ns == (4 + 2) * STALL
    assert outcome.together is not None
    assert outcome.together.saving.median_ns == (4 + 2 + 1) * STALL
    assert [f.site.text for f in outcome.order if f.site] == ["dear", "medium", "cheap"]
    assert "All together" in TrialReport.of(outcome).to_text()


def arm_result(name: str, median: int, finding: Finding | None = None) -> ArmResult:
    saving = Saving(median_ns=median, low_ns=median - 5, high_ns=median + 5, basis="")
    return ArmResult(finding=finding, mode=name, text=name, prediction=True, saving=saving, num_pairs=9)


def test_what_gives_nothing_more_once_others_are_fixed_is_left_out() -> None:
    rows = [finding(name, "host-sync", "item") for name in ("dear", "medium", "cheap")]
    arms = [arm_result("gone", ns, row) for ns, row in zip((500, 400, 100), rows, strict=True)]
    outcome = TrialOutcome(diagnosis=diagnosis(rows), base_ns=1000)
    overlapping = replace(outcome, arms=(*arms, arm_result("first 2", 499), arm_result("all", 600)))
    order, notes = fix_order(overlapping)
    assert order == (rows[0], rows[2])
    assert [f"{line_of('medium')} gives nothing more" in note for note in notes] == [True]
    order, notes = fix_order(replace(outcome, arms=tuple(arms)))
    assert order == tuple(rows)
    assert "alone" in notes[0]


def test_a_loop_that_ends_early_says_so_and_claims_nothing(device: Any) -> None:
    loop = Loop()

    def step(number: int) -> None:
        loop.train(loop.pool[0].cuda(), lambda loss: loss.item())  # short

    outcome = tried(device, loop, step, finding("short", "host-sync", "item"), most=8 + 30 * 5)
    assert not outcome.complete
    assert 0 < outcome.rounds < 6
    assert not outcome.arms[0].saving.significant
    assert "ended after" in outcome.notes[0]
