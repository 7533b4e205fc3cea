"""Each kind of suspect of a real loop on the emulated device, switched off and on: the same numbers, or a reason."""

import gc
from functools import partial
from typing import Any

import pytest
import suspect_trials
import torch
from suspect_trials import STALL, Loop, saving, tried

import perfdoctor
from perfdoctor.report.trial import TrialReport
from perfdoctor.trial.loader_replay import LoaderReplay

finding = partial(suspect_trials.finding, __file__)


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
