"""graphed_step on a GPU: bit for bit what the eager step gives."""

import copy
from contextlib import nullcontext

import pytest
import torch
from graphed_gpu_parts import batches, build, losses_of, network, stepper
from torch import nn

import perfdoctor
from perfdoctor.treat.graph_obstacles import graph_obstacles
from perfdoctor.treat.graph_optimizers import make_capturable
from perfdoctor.treat.graphed_step import GRAPHED_STEP, GraphLimitWarning, graphed_step
from perfdoctor.treat.treatment import Loop

pytestmark = pytest.mark.gpu


def compare(optimizer, options, schedule=None, steps=200, given=None, **how):
    given = given or batches(steps)
    runs = []
    for graphed in (False, True):
        model, opt, sched, step = build(optimizer, options, schedule, **how)
        torch.manual_seed(11)
        if graphed:
            step = graphed_step(step, *given[0], model=model, optimizer=opt)
        losses = losses_of(step, given, sched)
        runs.append(
            (losses, [t.detach().clone() for t in (*model.parameters(), *model.buffers())], torch.cuda.get_rng_state())
        )
    (eager, eager_state, eager_random), (graph, graph_state, graph_random) = runs
    assert torch.equal(eager, graph)
    assert len(eager.unique()) > steps // 2
    assert all(torch.equal(a, b) for a, b in zip(eager_state, graph_state, strict=True))
    assert torch.equal(eager_random, graph_random)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {}), (torch.optim.AdamW, {"fused": True}), (torch.optim.Adam, {"foreach": False}),
        (torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
        (torch.optim.NAdam, {}), (torch.optim.RAdam, {}), (torch.optim.RMSprop, {"momentum": 0.5}),
        (torch.optim.Adamax, {}), (torch.optim.Adadelta, {}),
    ],
)  # fmt: skip
def test_two_hundred_losses_are_those_of_the_eager_step(optimizer, options):
    compare(optimizer, options)


@pytest.mark.parametrize("zero", ["none", "in place", "after"])
def test_however_gradients_are_zeroed(zero):
    compare(torch.optim.AdamW, {}, zero=zero, steps=50)


def test_with_our_clip():
    compare(torch.optim.AdamW, {}, clip=perfdoctor.clip_grad_norm_, steps=50)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda opt: torch.optim.lr_scheduler.StepLR(opt, 3, 0.7),
        lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 50),
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    ],
)
def test_with_a_schedule(schedule):
    compare(torch.optim.AdamW, {}, schedule, steps=60)
    compare(torch.optim.SGD, {"momentum": 0.9}, schedule, steps=60)


def test_a_rate_written_as_a_number_is_followed_without_a_wait():
    model, opt, _, step = build(torch.optim.SGD, {})
    given = batches(3)
    graphed = graphed_step(step, *given[0], model=model, optimizer=opt)
    before = [p.detach().clone() for p in model.parameters()]
    opt.param_groups[0]["lr"] = 0.0
    with perfdoctor.sync_guard(budget=0):
        graphed(*given[0])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    opt.param_groups[0]["lr"] = 0.1
    graphed(*given[1])
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("zero", ["none", "in place", "after"])
def test_several_shapes_and_odd_batches_in_any_order(zero):
    wide, narrow, odd = batches(40, 16), batches(40, 12), batches(40, 5)
    order = [row for rows in zip(wide, wide, narrow, odd, narrow, strict=False) for row in rows]
    with pytest.warns(GraphLimitWarning):
        mixed(order, zero)


def mixed(order, zero):
    runs = []
    for graphed in (False, True):
        model, opt, _, step = build(torch.optim.AdamW, {}, zero=zero)
        torch.manual_seed(3)
        run = graphed_step(step, *order[0], model=model, optimizer=opt, max_graphs=2) if graphed else step
        grads = []

        def look(index, model=model, grads=grads):
            if index % 7 == 0:
                grads.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)

        runs.append((losses_of(run, order, after=look), grads))
    assert torch.equal(runs[0][0], runs[1][0])
    assert len(runs[0][1]) == len(runs[1][1])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    assert run.num_graphs == 2
    assert run.num_eager > 30
    assert run.num_replays > 100


def test_zero_grad_outside_the_step():
    """The step adds to what .grad holds; the user clears it between the steps."""
    given = batches(30)
    runs = []
    for graphed in (False, True):
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=1e-2)
        make_capturable(opt)

        def step(x, y, model=model, opt=opt):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        torch.manual_seed(3)
        run = graphed_step(step, *given[0], model=model, optimizer=opt) if graphed else step

        def clear(index, opt=opt):
            if index % 3 == 0:
                opt.zero_grad(set_to_none=index % 2 == 0)

        runs.append(losses_of(run, given, after=clear))
    assert torch.equal(*runs)


def test_kept_outputs_stay():
    model, opt, _, step = build(torch.optim.AdamW, {})

    def metrics(x, y):
        loss = step(x, y)
        return {"loss": loss, "pair": (loss * 2, x.mean())}

    given = batches(200)
    run = graphed_step(metrics, *given[0], model=model, optimizer=opt)
    kept = [run(*batch) for batch in given]
    assert len({row["loss"].item() for row in kept}) > 190
    for row, (x, _) in zip(kept, given, strict=True):
        assert torch.equal(row["pair"][0], row["loss"] * 2)
        assert torch.equal(row["pair"][1], x.mean())


def test_a_generator_of_the_users_own_goes_on():
    given = batches(50)
    runs = []
    for graphed in (False, True):
        model, opt, _, step = build(torch.optim.SGD, {})
        noise = torch.Generator(device="cuda").manual_seed(5)

        def noisy(x, y, step=step, noise=noise):
            return step(x + torch.randn(x.shape, device="cuda", generator=noise), y)

        torch.manual_seed(3)
        run = graphed_step(noisy, *given[0], model=model, optimizer=opt) if graphed else noisy
        runs.append((losses_of(run, given), noise.get_state()))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


def test_bf16_autocast_inside_and_around():
    for around in (False, True):
        given = batches(50)
        runs = []
        for graphed in (False, True):
            model, opt, _, step = build(torch.optim.AdamW, {})

            def cast(x, y, model=model, opt=opt):
                opt.zero_grad()
                with torch.autocast("cuda", torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                opt.step()
                return loss

            chosen = step if around else cast
            torch.manual_seed(3)
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if around else nullcontext():
                run = graphed_step(chosen, *given[0], model=model, optimizer=opt) if graphed else chosen
                runs.append(losses_of(run, given))
        assert torch.equal(*runs), (around, (runs[0] - runs[1]).abs().max(), runs)


def test_calls_wait_for_nothing():
    model, opt, _, step = build(torch.optim.AdamW, {})
    given = batches(5)
    run = graphed_step(step, *given[0], model=model, optimizer=opt)
    with perfdoctor.sync_guard(budget=0):
        for batch in given:
            run(*batch)


def test_a_loaded_checkpoint_is_followed():
    model, opt, _, step = build(torch.optim.AdamW, {})
    given = batches(20)
    run = graphed_step(step, *given[0], model=model, optimizer=opt)
    losses_of(run, given[:5])
    kept, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    random = torch.cuda.get_rng_state()
    first = losses_of(run, given[5:])
    opt.load_state_dict(kept)
    model.load_state_dict(weights)
    torch.cuda.set_rng_state(random)
    assert torch.equal(first, losses_of(run, given[5:]))
    assert run.num_graphs == 1


def test_as_a_treatment():
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = stepper(model, opt)
    given = batches(6)
    loop = Loop(device=torch.device("cuda", 0), model=model, optimizers=(opt,), train_step=step, sample_batch=given[0])
    assert GRAPHED_STEP.refuses(loop) is None
    with GRAPHED_STEP.applied(loop) as treated:
        losses_of(treated.train_step, given[:3])
    assert opt.param_groups[0]["capturable"] is False
    assert isinstance(opt.param_groups[0]["lr"], float)
    losses_of(step, given[3:])


def test_obstacles_on_the_device_itself():
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = stepper(model, opt)
    calls = {"n": 0}

    def bad(x, y):
        calls["n"] += 1
        loss = step(x, y)
        return loss.item()

    before = [p.detach().clone() for p in model.parameters()]
    found = graph_obstacles(bad, *batches(1)[0])
    line = bad.__code__.co_firstlineno
    assert {(row.code, row.site.frame.line) for row in found} >= {
        ("capture-python-state", line + 1), ("capture-sync", line + 3)
    }  # fmt: skip
    assert calls == {"n": 0}
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
