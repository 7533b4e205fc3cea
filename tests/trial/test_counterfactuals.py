"""Suspects of a real loop on the emulated device, switched off and on, timed by a device clock that counts crossings.

The clock says 1000 for a step and 100 for each call of it that stalls the host: what a suspect gives back is known.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import perfdoctor
from perfdoctor.diagnose.finding import Binding, Diagnosis, Finding, Saving, Severity, StepTime
from perfdoctor.record.capture import Frame, Site
from perfdoctor.report.trial import TrialReport
from perfdoctor.trial.arms import fix_order
from perfdoctor.trial.clock import BlockClock
from perfdoctor.trial.loader_replay import LoaderReplay
from perfdoctor.trial.outcome import ArmResult, TrialOutcome
from perfdoctor.trial.runner import Limits, Trial
from perfdoctor.trial.suspects import Surroundings, choose_suspects

STEP, STALL = 1000, 100
HERE = Path(__file__)


@pytest.fixture
def device() -> Iterator[Any]:
    with perfdoctor.emulate_cuda() as emulated:
        yield emulated


class Loop:
    """A small model on the device, and what a test puts into its step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to("cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self.pool = [torch.randn(4, 8) for _ in range(4)]
        self.steps = 0
        self.seen: list[Any] = []

    def train(self, x: torch.Tensor, extra: Callable[[torch.Tensor], Any]) -> None:
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.seen.append(extra(loss))
        self.optimizer.step()
        self.steps += 1


def line_of(marker: str) -> int:
    lines = HERE.read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if f"# {marker}" in line and "line_of" not in line)


def finding(marker: str, code: str, kind: str, **fields: Any) -> Finding:
    site = None
    if marker:
        site = Site(frame=Frame(file=str(HERE), line=line_of(marker), function="", owner="user"), text=marker)
    title = fields.pop("title", kind)
    return Finding(code=code, severity=Severity.COST, title=title, kind=kind, site=site, count=1.0, **fields)


def diagnosis(*findings: Finding) -> Diagnosis:
    step = StepTime(median_ns=25_000_000, low_ns=0, high_ns=0, num_steps=10, basis="test")  # blocks of eight or ten
    return Diagnosis(
        source="test", step=step, accounting=None, binding=Binding.UNKNOWN, findings=findings, leave_alone=()
    )


def tried(
    device: Any,
    loop: Loop,
    step: Callable[[int], None],
    *findings: Finding,
    most: int = 100_000,
    replay: LoaderReplay | None = None,
    steps: int = 1000,
    room: int = 10,
) -> TrialOutcome:
    """Run `step` until the trial is over, with the clock of crossings."""
    now = [0]
    replay = replay or LoaderReplay(lambda: None)
    suspects = choose_suspects(diagnosis(*findings), Surroundings(optimizers=(loop.optimizer,), replay=replay))
    trial = Trial(
        diagnosis(*findings),
        suspects,
        replay,
        limits=Limits(steps=steps, seconds=600),
        most=room,
        clock=BlockClock(lambda a, b: b - a),
    )
    trial.start()
    try:
        for number in range(most):
            before = len(device.log.hits)
            step(number)
            now[0] += STEP + STALL * (len(device.log.hits) - before)
            trial.step_ended(now[0])
            if trial.over:
                break
    finally:
        trial.finish()
    return trial.outcome()


def saving(outcome: TrialOutcome, mode: str) -> tuple[int, int, int]:
    arm = next(arm for arm in outcome.arms if arm.mode == mode)
    return arm.saving.median_ns, arm.saving.low_ns, arm.saving.high_ns


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


def test_a_pageable_copy_gets_a_pinned_twin(device: Any) -> None:
    loop = Loop()
    means: dict[int, set[float]] = {}

    def step(number: int) -> None:
        x = loop.pool[number % 4].to("cuda")  # pageable
        loop.train(x, lambda loss: None)
        means.setdefault(number % 4, set()).add(x.data_ptr())

    outcome = tried(device, loop, step, finding("pageable", "pageable-copy", "h2d_pageable"))
    assert saving(outcome, "pinned") == (STALL, STALL, STALL)
    assert saving(outcome, "gone") == (STALL, STALL, STALL)
    assert not next(arm for arm in outcome.arms if arm.mode == "gone").prediction


def test_two_copies_of_one_shape_on_a_line_keep_their_own_values(device: Any) -> None:
    """Tokens and labels, made anew in each step: memory comes back, and no batch is ever the same object again."""
    loop = Loop()
    wrong = []

    def step(number: int) -> None:
        tokens, labels = torch.randint(100, 200, (8,)), torch.randint(0, 5, (8,))
        tokens, labels = (each.float().to("cuda") for each in (tokens, labels))  # both
        with perfdoctor.allow_sync("looking"):
            if tokens.min() < 100 or labels.max() > 4:
                wrong.append(number)
        loop.train(loop.pool[0].cuda(), lambda loss: None)

    outcome = tried(device, loop, step, finding("both", "pageable-copy", "h2d_pageable"))
    assert {arm.mode for arm in outcome.arms} >= {"pinned", "gone"}
    assert wrong == []


def test_a_tensor_built_for_its_copy_is_made_once(device: Any) -> None:
    loop = Loop()
    weights = []

    def step(number: int) -> None:
        weight = torch.tensor([1.0, 2.0], device="cuda")  # built
        weights.append(weight.tolist())
        loop.train(loop.pool[0].cuda(), lambda loss: None)

    outcome = tried(device, loop, step, finding("built", "blocking-copy", "h2d_blocking"))
    assert saving(outcome, "gone")[0] == STALL
    assert weights == [[1.0, 2.0]] * len(weights)


def test_a_mask_of_fixed_size_gathers_with_the_indices_of_before(device: Any) -> None:
    loop = Loop()
    mask = torch.tensor([True, False, True, False]).cuda()
    shapes = set()

    def step(number: int) -> None:
        x = loop.pool[0].cuda()
        kept = x[mask]  # mask
        shapes.add(kept.shape)
        loop.train(kept, lambda loss: None)

    outcome = tried(device, loop, step, finding("mask", "host-sync", "boolean_mask"))
    assert saving(outcome, "gone")[0] == STALL
    assert shapes == {torch.Size([2, 8])}


def test_a_mask_whose_size_changes_is_refused(device: Any) -> None:
    loop = Loop()

    def step(number: int) -> None:
        x = loop.pool[number % 4].cuda()
        loop.train(x, lambda loss: x[x > 0].sum())  # changing

    outcome = tried(device, loop, step, finding("changing", "host-sync", "boolean_mask"))
    assert not outcome.arms
    assert "another size each time" in outcome.refused[0].why


def test_a_mask_whose_size_is_that_of_its_batch_gathers_as_that_batch_did(device: Any) -> None:
    loop = Loop()
    replay = LoaderReplay(lambda: None)
    lengths = [3, 1, 4, 2]
    batches = iter([torch.arange(4) < lengths[i % 4] for i in range(100_000)])
    seen = []

    def step(number: int) -> None:
        mask = replay.next_of(batches).to("cuda")
        x = torch.ones(4, 8).cuda()
        kept = x[mask]  # padded
        seen.append(kept.shape[0])
        loop.train(kept, lambda loss: None)

    outcome = tried(device, loop, step, finding("padded", "host-sync", "boolean_mask"), replay=replay)
    assert saving(outcome, "gone")[0] == STALL, outcome.refused
    assert seen == [lengths[i % 4] for i in range(len(seen))]  # round and round


def test_a_norm_loop_becomes_one_call_with_the_same_values(device: Any) -> None:
    loop = Loop()

    def norms(loss: torch.Tensor) -> float:
        return sum(p.grad.norm().item() ** 2 for p in loop.model.parameters()) ** 0.5  # norm loop

    outcome = tried(
        device,
        loop,
        lambda n: loop.train(loop.pool[0].cuda(), norms),
        finding("norm loop", "gradient-loop", "slow_grad_norm_loop"),
    )
    assert saving(outcome, "multi-tensor")[0] == 4 * STALL  # one read for each of four parameters


def test_a_norm_loop_over_lines_of_squares(device: Any) -> None:
    loop = Loop()

    def norms(loss: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device="cuda")
        for p in loop.model.parameters():
            assert p.grad is not None
            total += p.grad.pow(2).sum()  # squares
        return total.detach().clone()

    outcome = tried(
        device,
        loop,
        lambda n: loop.train(loop.pool[0].cuda(), norms),
        finding("squares", "gradient-loop", "slow_grad_norm_loop"),
    )
    assert [arm.mode for arm in outcome.arms] == ["multi-tensor"]
    values = torch.stack([value.cpu() for value in loop.seen])
    changes = (values[1:] / values[:-1] - 1).abs()
    assert float(changes.max()) < 0.2  # blocks on and off go on from each other


def test_the_single_tensor_optimizer_is_fused_and_put_back(device: Any) -> None:
    loop = Loop()
    flags = []

    def step(number: int) -> None:
        loop.train(loop.pool[0].cuda(), lambda loss: None)
        flags.append(loop.optimizer.param_groups[0]["fused"])

    loop_finding = finding("", "gradient-loop", "launch_bound", title="a single-tensor optimizer step: 9 launches")
    outcome = tried(device, loop, step, loop_finding)
    assert [arm.mode for arm in outcome.arms] == ["fused"]
    assert True in flags
    group = loop.optimizer.param_groups[0]
    assert (group["fused"], group["foreach"]) == (None, False)
    for state in loop.optimizer.state.values():
        assert not state["step"].is_cuda
        assert float(state["step"]) == loop.steps


def test_an_average_by_hand_becomes_multi_tensor_calls(device: Any) -> None:
    loop = Loop()
    shadow = [p.detach().clone() for p in loop.model.parameters()]
    reference = [p.detach().clone() for p in loop.model.parameters()]

    def step(number: int) -> None:
        loop.train(loop.pool[0].cuda(), lambda loss: None)
        with torch.no_grad():
            for mine, p in zip(shadow, loop.model.parameters(), strict=True):
                mine.mul_(0.9).add_(p.detach(), alpha=0.1)  # average
            torch._foreach_mul_(reference, 0.9)
            torch._foreach_add_(reference, [p.detach() for p in loop.model.parameters()], alpha=0.1)

    outcome = tried(device, loop, step, finding("average", "gradient-loop", "launch_bound"))
    assert [arm.mode for arm in outcome.arms] == ["multi-tensor"], outcome.refused
    for mine, other in zip(shadow, reference, strict=True):
        assert torch.allclose(mine.cpu(), other.cpu(), atol=1e-6)


def test_a_launch_bound_loop_is_tried_with_its_model_as_a_graph(device: Any) -> None:
    losses = []
    for findings in ((), (finding("", "launch-bound", "launch_bound"), finding("", "small-kernels", "launch_bound"))):
        loop = Loop()

        def step(number: int, loop: Loop = loop) -> None:
            loop.train(loop.pool[number % 4].cuda(), lambda t: t.detach())

        outcome = tried(device, loop, step, *findings, steps=400)
        while loop.steps < 400:
            step(loop.steps)
        losses.append([value.item() for value in loop.seen[:400]])
    assert saving(outcome, "graph") == (0, 0, 0)  # no read goes, and the clock counts nothing else
    assert [row.finding.code for row in outcome.refused] == ["small-kernels"]
    assert losses[0] == losses[1]
    assert "forward and backward as CUDA graphs" in TrialReport.of(outcome).to_text()


def test_calls_that_ran_as_ever_are_said(device: Any) -> None:
    loop = Loop()

    def step(number: int) -> None:
        loop.train(torch.randn(3 if number > 20 and number % 7 == 0 else 4, 8).cuda(), lambda t: t.detach())

    outcome = tried(device, loop, step, finding("", "launch-bound", "launch_bound"), steps=400)
    assert [arm.mode for arm in outcome.arms] == ["graph"]
    assert [note for note in outcome.notes if "not like those observed" in note]


def test_a_launch_bound_loop_that_no_graph_can_hold_says_why(device: Any) -> None:
    loop = Loop()

    def step(number: int) -> None:
        loop.train(torch.randn(4 + number % 2, 8).cuda(), lambda t: t.detach())

    outcome = tried(device, loop, step, finding("", "launch-bound", "launch_bound"))
    assert not outcome.arms
    assert "other shapes" in outcome.refused[0].why


def test_waits_are_skipped_and_times_still_answered(device: Any) -> None:
    loop = Loop()

    def step(number: int) -> None:
        loop.train(loop.pool[0].cuda(), lambda loss: torch.cuda.synchronize())  # wait

    outcome = tried(device, loop, step, finding("wait", "host-sync", "cuda_synchronize"))
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
    outcome = TrialOutcome(diagnosis=diagnosis(*rows), base_ns=1000)
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


def test_everything_is_put_back(device: Any) -> None:
    loop = Loop()
    names = ("item", "to", "norm", "__getitem__", "__bool__", "mul_")
    before = {name: vars(torch.Tensor).get(name) for name in names}
    functions = (torch.cuda.synchronize, torch.tensor, torch.norm, gc.collect)

    def step(number: int) -> None:
        loop.train(loop.pool[0].cuda(), lambda loss: loss.item())  # restored
        assert number < 20, "the loop fails"

    findings = [
        finding("restored", "host-sync", "item"),
        finding("built", "blocking-copy", "h2d_blocking"),
        finding("mask", "host-sync", "boolean_mask"),
        finding("average", "gradient-loop", "launch_bound"),
        finding("", "garbage-collection", "python_gc"),
    ]
    with pytest.raises(AssertionError, match="the loop fails"):
        tried(device, loop, step, *findings)
    assert {name: vars(torch.Tensor).get(name) for name in names} == before
    assert all(vars(torch.Tensor).get(name) is before[name] for name in names)
    assert (torch.cuda.synchronize, torch.tensor, torch.norm, gc.collect) == functions
    assert gc.isenabled()
