"""graphed_step on a GPU: bit for bit what the eager step gives, and a usable process after a failure."""

import copy
import gc
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import perfdoctor
from perfdoctor.errors import TreatmentRefused
from perfdoctor.treat.graph_optimizers import make_capturable
from perfdoctor.treat.graphed_step import GRAPHED_STEP, GraphLimitWarning, graphed_step
from perfdoctor.treat.treatment import Loop

pytestmark = pytest.mark.gpu


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2),
        nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8),
    ).cuda()  # fmt: skip


def batches(count, rows=16):
    generator = torch.Generator(device="cuda").manual_seed(7)
    return [
        (
            torch.randn(rows, 32, device="cuda", generator=generator),
            torch.randint(0, 8, (rows,), device="cuda", generator=generator),
        )
        for _ in range(count)
    ]


def stepper(model, opt, zero="none", clip=torch.nn.utils.clip_grad_norm_):
    def train_step(x, y):
        if zero != "after":
            opt.zero_grad(set_to_none=zero == "none")
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if clip is not None:
            clip(model.parameters(), 0.5)
        opt.step()
        if zero == "after":
            opt.zero_grad(set_to_none=True)
        return loss

    return train_step


def losses_of(step, given, sched=None, after=None):
    found = []
    for index, batch in enumerate(given):
        found.append(step(*batch))
        if sched is not None:
            sched.step()
        if after is not None:
            after(index)
    return torch.stack([loss.detach() for loss in found])


def build(optimizer, options, schedule=None, **how):
    model = network()
    opt = optimizer(model.parameters(), **{"lr": 1e-2, **options})
    make_capturable(opt)  # the same optimizer on both sides
    sched = schedule(opt) if schedule is not None else None
    return model, opt, sched, stepper(model, opt, **how)


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


def usable(before):
    """After a failure: eager dropout, allocation and a new graph work; nothing has changed."""
    model, opt, weights, random = before
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert torch.equal(random, torch.cuda.get_rng_state())
    nn.functional.dropout(torch.ones(1000, device="cuda"), 0.5).sum().item()
    torch.cuda.set_rng_state(random)
    step = stepper(model, opt)
    given = batches(3)
    run = graphed_step(step, *given[0], model=model, optimizer=opt)
    losses = losses_of(run, given)
    assert losses.isfinite().all()
    assert run.num_replays == 3


def fresh():
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, opt, [p.detach().clone() for p in model.parameters()], torch.cuda.get_rng_state()


def test_a_wait_that_only_graph_capture_sees():
    before = fresh()
    model, opt = before[:2]
    step = stepper(model, opt)

    def waiting(x, y):
        loss = step(x, y)
        torch.cuda.current_stream().synchronize()
        return loss

    with pytest.raises(TreatmentRefused) as caught:
        graphed_step(waiting, *batches(1)[0], model=model, optimizer=opt)
    assert f"test_graphed_step_gpu.py:{waiting.__code__.co_firstlineno + 2}" in str(caught.value)
    assert opt.param_groups[0]["lr"] == 1e-2
    assert not opt.state
    usable(before)


def test_a_read_is_refused_with_its_line_before_any_graph_capture():
    before = fresh()
    model, opt = before[:2]
    step = stepper(model, opt)

    def reading(x, y):
        return step(x, y).item()

    with pytest.raises(TreatmentRefused, match=r"item: reads a device value") as caught:
        graphed_step(reading, *batches(1)[0], model=model, optimizer=opt)
    assert f"test_graphed_step_gpu.py:{reading.__code__.co_firstlineno + 1}" in str(caught.value)
    usable(before)


def test_an_error_during_graph_capture():
    before = fresh()
    model, opt = before[:2]
    step = stepper(model, opt)

    def failing(x, y):
        loss = step(x, y)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("in the graph")
        return loss

    with pytest.raises(TreatmentRefused, match="in the graph"):
        graphed_step(failing, *batches(1)[0], model=model, optimizer=opt)
    usable(before)


def test_a_failure_leaves_the_graphs_before_it_right():
    """The default generator serves the first graph and the failed one: dropout must go on as in eager."""
    given, more = batches(20), batches(20, 12)
    runs = []
    for graphed in (False, True):
        model, opt, _, step = build(torch.optim.AdamW, {})
        torch.manual_seed(3)

        def picky(x, y, step=step):
            loss = step(x, y)
            if len(x) == 12 and torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()
            return loss

        run = graphed_step(picky, *given[0], model=model, optimizer=opt) if graphed else picky
        order = [row for pair in zip(given, more, strict=True) for row in pair]
        if graphed:
            with pytest.warns(GraphLimitWarning, match="runs eagerly"):
                runs.append(losses_of(run, order))
        else:
            runs.append(losses_of(run, order))
    assert torch.equal(*runs)
    assert run.num_graphs == 1


def test_out_of_memory_says_so_and_gives_the_memory_back():
    before = fresh()
    model, opt = before[:2]
    step = stepper(model, opt)
    total = torch.cuda.get_device_properties(0).total_memory

    def greedy(x, y):
        loss = step(x, y)
        if torch.cuda.is_current_stream_capturing():
            held = torch.empty(2 * total, dtype=torch.uint8, device="cuda")
            loss = loss + held[0]
        return loss

    other = network()
    other_opt = torch.optim.AdamW(other.parameters())
    graphed_step(stepper(other, other_opt), *batches(1)[0], model=other, optimizer=other_opt)  # workspaces of cuBLAS
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    with pytest.raises(TreatmentRefused, match="out of device memory") as caught:
        graphed_step(greedy, *batches(1)[0], model=model, optimizer=opt)
    assert f"test_graphed_step_gpu.py:{greedy.__code__.co_firstlineno + 3}" in str(caught.value)
    del caught
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved + 32 * 2**20
    usable(before)


def test_a_thread_that_pins_memory_is_no_trouble():
    model, opt, _, step = build(torch.optim.AdamW, {})
    given = batches(3)
    stop = threading.Event()

    def pin():
        size = 1
        while not stop.is_set():
            torch.empty(size * 4096, pin_memory=True)
            size = size % 4096 + 1

    thread = threading.Thread(target=pin, daemon=True)
    thread.start()
    try:
        for _ in range(5):
            run = graphed_step(step, *given[0], model=model, optimizer=opt)
            run(*given[1])
    finally:
        stop.set()
        thread.join()


def test_released_graphs_give_their_memory_back():
    model, opt, _, step = build(torch.optim.AdamW, {})
    given = batches(2)
    sizes = []
    for _ in range(4):
        run = graphed_step(step, *given[0], model=model, optimizer=opt)
        run(*given[1])
        run.release()
        make_capturable(opt)
        del run
        gc.collect()
        torch.cuda.empty_cache()
        sizes.append(torch.cuda.memory_reserved())
    assert sizes[-1] <= sizes[1] + 4 * 2**20


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
    found = perfdoctor_obstacles(bad, *batches(1)[0])
    line = bad.__code__.co_firstlineno
    assert {(row.code, row.site.frame.line) for row in found} >= {
        ("capture-python-state", line + 1), ("capture-sync", line + 3)
    }  # fmt: skip
    assert calls == {"n": 0}
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def perfdoctor_obstacles(*args):
    from perfdoctor.treat.graph_obstacles import graph_obstacles

    return graph_obstacles(*args)
