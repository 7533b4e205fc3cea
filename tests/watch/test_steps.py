"""Step boundaries with real optimizers, one and several, scalers, closures and compiled updates."""

import itertools
import subprocess
import sys

import pytest
import torch

from perfdoctor.watch import steps
from perfdoctor.watch.steps import _BESIDE_OPTIMIZER, BACKWARDS, BATCHES, HOOKS, MARKS, PATIENCE, StepDetector


@pytest.fixture
def detector():
    ticks = itertools.count()
    ends = []
    detector = StepDetector(lambda: next(ticks), ends.append)
    detector.ends = ends
    detector.install()
    yield detector
    detector.remove()


def optimizer(kind=torch.optim.SGD, **options):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return kind([parameter], lr=0.1, **options)


def test_one_optimizer_ends_a_step_each_time(detector):
    one = optimizer()
    for _ in range(5):
        one.step()
    # The first end is known at the second update; its stamp is that of the first.
    assert detector.ends == [0, 1, 2, 3, 4]
    assert detector.source == HOOKS


def test_a_cycle_of_two_optimizers_is_one_step(detector):
    first, second = optimizer(), optimizer(torch.optim.AdamW)
    for _ in range(4):
        first.step()
        second.step()
    assert detector.ends == [1, 3, 5, 7]  # each at the second one's update


def test_an_optimizer_that_steps_again_begins_a_new_step(detector):
    critic, generator = optimizer(), optimizer()
    for step in range(6):
        critic.step()
        if step % 3 == 2:
            generator.step()
    # Stamps: critic 0, 1, 2, generator 3, critic 4, 5, 6, generator 7.
    assert detector.ends[:2] == [0, 1]
    assert detector.ends == sorted(set(detector.ends))
    assert len(detector.ends) >= 6


@pytest.mark.parametrize("updates", [2, 5, 9])
@pytest.mark.parametrize("first", ["critic", "generator"])
def test_a_critic_updated_often_on_one_batch_is_one_step_with_its_generator(detector, updates, first):
    critic, generator = optimizer(), optimizer(torch.optim.AdamW)
    for _ in range(8):
        detector.requested()
        if first == "generator":
            generator.step()
        for _ in range(updates):
            critic.step()
        if first == "critic":
            generator.step()
    # From the third batch on the cycle is known. A stamp an update: each end is one cycle after the end before it.
    assert [b - a for a, b in itertools.pairwise(detector.ends[-4:])] == [updates + 1] * 3
    found = {type(each): count for each, count in detector.updates_per_step()}
    assert found[torch.optim.SGD] == pytest.approx(updates, rel=0.3)
    assert found[torch.optim.AdamW] == pytest.approx(1, rel=0.3)


def test_what_was_taken_for_steps_before_the_generator_was_met_does_not_count():
    ends, restarts = [], []
    detector = StepDetector(lambda: 0, ends.append, lambda: (restarts.append(len(ends)), ends.clear()))
    detector.install()
    try:
        critic, generator = optimizer(), optimizer(torch.optim.AdamW)
        for _ in range(6):
            detector.requested()
            for _ in range(5):
                critic.step()
            generator.step()
    finally:
        detector.remove()
    assert restarts == [5]
    assert len(ends) == 5  # of the second batch and those after it; the first was being learnt


@pytest.mark.parametrize("asked", [True, False])
def test_two_optimizers_that_alternate_are_as_ever(detector, asked):
    actor, critic = optimizer(), optimizer(torch.optim.AdamW)
    for _ in range(3):
        if asked:
            detector.requested()
        for _ in range(4):  # several rounds over each batch
            actor.step()
            critic.step()
    assert [b - a for a, b in itertools.pairwise(detector.ends[-8:])] == [2] * 7


def test_one_optimizer_that_steps_often_on_a_batch_makes_as_many_steps(detector):
    one = optimizer()
    for _ in range(3):
        detector.requested()
        for _ in range(4):
            one.step()
    assert len(detector.ends) == 12


def test_a_critic_with_a_batch_for_each_update_steps_with_its_batches(detector):
    critic, generator = optimizer(), optimizer(torch.optim.AdamW)
    for step in range(20):
        detector.requested()
        critic.step()
        if step % 5 == 4:
            generator.step()
    assert 18 <= len(detector.ends) <= 20


def test_a_closure_called_many_times_is_one_step(detector):
    weight = torch.nn.Parameter(torch.ones(2))
    lbfgs = torch.optim.LBFGS([weight], max_iter=4)
    calls = []

    def closure():
        lbfgs.zero_grad()
        loss = (weight - 3).square().sum()
        loss.backward()
        calls.append(1)
        return loss

    for _ in range(3):
        lbfgs.step(closure)
    assert len(calls) > 3
    assert len(detector.ends) == 3


def test_an_update_left_out_by_a_scaler_ends_its_step(detector):
    one = optimizer()
    weight = one.param_groups[0]["params"][0]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for gradient in (1.0, 1.0, float("inf"), 1.0):
        weight.grad = None
        scaler.scale((weight * gradient).sum()).backward()
        scaler.step(one)
        scaler.update()
    assert len(detector.ends) == 4
    assert detector.num_skipped == 1


def test_batches_stand_in_for_an_optimizer_out_of_reach(detector):
    for _ in range(PATIENCE + 4):
        detector.requested()
    assert detector.source == BATCHES
    assert len(detector.ends) == 3


def test_accumulation_beyond_patience_starts_again_with_the_first_update():
    restarts = []
    detector = StepDetector(lambda: 0, lambda stamp: None, lambda: restarts.append(1))
    detector.install()
    try:
        for _ in range(PATIENCE + 2):
            detector.requested()
        optimizer().step()
    finally:
        detector.remove()
    assert restarts == [1]
    assert detector.source == HOOKS


def test_marks_by_hand_come_before_everything(detector):
    one = optimizer()
    detector.mark()
    for _ in range(3):
        detector.requested()
        one.step()
        one.step()
        detector.mark()
    assert detector.source == MARKS
    assert len(detector.ends) == 4


def test_new_optimizers_in_a_second_run(detector):
    for _ in range(2):
        one = optimizer()
        for _ in range(3):
            one.step()
    assert len(detector.ends) == 6


def test_nothing_is_left_behind():
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import optimizer as module

    def state():
        hooks = (dict(module._global_optimizer_pre_hooks), dict(module._global_optimizer_post_hooks))
        return hooks, GradScaler.update

    before = state()
    detector = StepDetector(lambda: 0, lambda stamp: None)
    detector.install()
    assert state() != before
    detector.remove()
    assert state() == before


def test_accumulation_that_was_seen_once_is_known_from_then_on(detector):
    one = optimizer()
    for _ in range(3):
        for _ in range(2 * PATIENCE):
            detector.requested()
        one.step()
    # The batches past patience before the first update, then the updates, and no batch any more.
    assert len(detector.ends) == PATIENCE - 1 + 3
    assert detector.source == HOOKS


def test_accumulation_that_is_told_is_no_reason_to_count_batches(detector):
    detector.expect(3 * PATIENCE)
    one = optimizer()
    for _ in range(2):
        for _ in range(3 * PATIENCE):
            detector.requested()
        one.step()
    assert len(detector.ends) == 2


@pytest.fixture
def nothing_built(monkeypatch):
    """As in a fresh process: no torch optimizer has been built so far."""
    monkeypatch.setattr(steps, "_optimizer_built", lambda: False)


def manual_update(weight, call):
    loss = (weight - 3).square().sum()
    if call == "backward":
        loss.backward()
        gradient, weight.grad = weight.grad, None
    else:
        (gradient,) = torch.autograd.grad(loss, weight)
    with torch.no_grad():
        weight -= 0.1 * gradient


@pytest.mark.parametrize("call", ["backward", "grad"])
def test_backward_passes_stand_in_where_parameters_are_updated_by_hand(detector, nothing_built, call):
    weight = torch.ones(2, requires_grad=True)
    for _ in range(9):
        manual_update(weight, call)
    assert detector.source == BACKWARDS
    assert len(detector.passes) == 3  # before they were taken for steps
    assert len(detector.ends) == 6


def test_where_an_optimizer_could_still_step_passes_need_patience(detector):
    optimizer()
    weight = torch.ones(2, requires_grad=True)
    for _ in range(_BESIDE_OPTIMIZER + 4):
        manual_update(weight, "backward")
    assert len(detector.ends) == 3


def test_gradients_added_up_over_many_passes_are_one_step(detector):
    """No batches are seen, and the first update comes after 100 passes."""
    weight = torch.nn.Parameter(torch.ones(2))
    one = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        for _ in range(100):
            weight.sum().backward()
        one.step()
    assert detector.source == HOOKS
    assert len(detector.ends) == 3


def test_a_process_knows_whether_an_optimizer_was_built():
    code = """
import torch
from perfdoctor.watch.steps import _optimizer_built
class Own(torch.optim.SGD):
    def step(self, closure=None):
        pass
assert not _optimizer_built()
Own([torch.nn.Parameter(torch.ones(1))], lr=0.1)
assert _optimizer_built()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_accumulation_before_a_late_optimizer_starts_again(nothing_built):
    restarts, ends = [], []
    detector = StepDetector(lambda: 0, ends.append, lambda: restarts.append(len(ends)))
    detector.install()
    try:
        weight = torch.ones(2, requires_grad=True)
        for _ in range(6):
            weight.sum().backward()
        one = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            for _ in range(2 * PATIENCE):
                weight.sum().backward()
            one.step()
    finally:
        detector.remove()
    # Six passes and those before the first update were taken for steps, which the restart takes back.
    assert restarts == [6 + 2 * PATIENCE - 3]
    assert len(ends) == restarts[0] + 3
    assert detector.source == HOOKS


def test_a_pass_inside_a_pass_is_not_one(detector, nothing_built):
    from torch.utils.checkpoint import checkpoint

    weight = torch.ones(2, requires_grad=True)
    for _ in range(5):
        checkpoint(lambda x: x.exp(), weight, use_reentrant=True).sum().backward()
    assert len(detector.passes) + len(detector.ends) == 5


def test_batches_come_before_passes(detector):
    weight = torch.ones(2, requires_grad=True)
    for _ in range(PATIENCE + 4):
        detector.requested()
        weight.sum().backward()
    assert detector.source == BATCHES
    assert len(detector.ends) == 3


def test_the_engine_s_name_is_put_back():
    before = torch.autograd._engine_run_backward
    detector = StepDetector(lambda: 0, lambda stamp: None)
    detector.install()
    assert torch.autograd._engine_run_backward is not before
    optimizer().step()  # from the first update on nothing is in the way
    assert torch.autograd._engine_run_backward is before
    detector.remove()
    assert torch.autograd._engine_run_backward is before


def test_two_detectors_put_the_engine_s_name_back_in_either_order():
    before = torch.autograd._engine_run_backward
    for first in (0, 1):
        detectors = [StepDetector(lambda: 0, lambda stamp: None) for _ in range(2)]
        for each in detectors:
            each.install()
        detectors[first].remove()
        assert torch.autograd._engine_run_backward is not before
        detectors[1 - first].remove()
        assert torch.autograd._engine_run_backward is before


def test_two_passes_over_each_batch_are_one_step(detector, nothing_built):
    weight = torch.ones(2, requires_grad=True)
    for _ in range(20):
        detector.requested()
        manual_update(weight, "backward")
        manual_update(weight, "backward")
    assert detector.source == BATCHES
    assert 15 <= len(detector.ends) <= 20


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_is_compiled_as_ever(nothing_built):
    """A compiled function breaks at backward(); what counts passes there is not compiled, whatever the user's code."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    def frames(watched):
        torch._dynamo.reset()
        counters.clear()
        weight = torch.ones(2, requires_grad=True)

        @torch.compile(backend="eager")
        def step(x):
            loss = (weight * x).sum()
            loss.backward()
            return loss.detach() * 2

        found = StepDetector(lambda: 0, lambda stamp: None)
        if watched:
            found.install()
        try:
            for _ in range(8):
                step(torch.ones(2))
        finally:
            found.remove()
        return counters["frames"]["total"], sum(counters["graph_break"].values()), len(found.passes)

    (plain, breaks, _), (total, broken, passes) = frames(False), frames(True)
    assert passes == 3
    assert broken == breaks
    assert total <= plain + 2
    torch._dynamo.reset()
