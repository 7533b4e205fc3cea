"""graphed_step, as far as it can be seen without a GPU: keys, caps, refusals, state left as found (emulated device)."""

import warnings
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from graphed_parts import CAPTURABLE, batch, build, numbers, same
from torch import nn

import perfdoctor
from perfdoctor.treat.graph_batch import batch_key, map_tensors
from perfdoctor.treat.graphed_step import GRAPHED_STEP, FrozenStateWarning, GraphLimitWarning, graphed_step
from perfdoctor.treat.treatment import Loop

pytestmark = pytest.mark.usefixtures("emulated")


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("optimizer", "options"), CAPTURABLE)
def test_making_the_graph_changes_no_number_and_the_steps_after_it_wait_for_nothing(optimizer, options, warm):
    model, opt, train_step = build(optimizer, **options)
    if warm:
        train_step(*batch())
    before, random_state = numbers(model), torch.get_rng_state()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    state = [v.clone() for row in opt.state.values() for v in row.values() if isinstance(v, torch.Tensor)]
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    assert same(before, numbers(model))
    assert torch.equal(random_state, torch.get_rng_state())
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)
    now = [v for row in opt.state.values() for v in row.values() if isinstance(v, torch.Tensor)]
    if warm and state:
        assert same([s.cpu() for s in state], [s.cpu() for s in now])
    assert all(v.is_cuda for v in now)
    addresses = [v.data_ptr() for v in now]
    given = batch(seed=2)
    with perfdoctor.sync_guard(budget=0):
        step(*given)
    later = [v for row in opt.state.values() for v in row.values() if isinstance(v, torch.Tensor)]
    assert [v.data_ptr() for v in later] == addresses


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_new_state_starts_where_the_first_eager_step_starts(options):
    """SGD's momentum is made by its first step: a state of zeros must give the same first steps."""
    for kind in (torch.optim.SGD, torch.optim.AdamW) if not options else (torch.optim.SGD,):
        torch.manual_seed(5)
        start = torch.randn(3)
        results = []
        for graphed in (False, True):
            p = nn.Parameter(start.clone().cuda())
            opt = kind([p], lr=0.25, **options)

            def train_step(x, p=p, opt=opt):
                opt.zero_grad()
                loss = (p * x).square().sum()
                loss.backward()
                opt.step()
                return loss

            x = torch.full((3,), 0.5).cuda()
            run = graphed_step(train_step, x, model=p, optimizer=opt) if graphed else train_step
            results.append([run(x).item() for _ in range(4)])
        # Capturable Adam takes 1 - 0.999**t in float32: 6e-5 of the first update.
        assert results[0] == pytest.approx(results[1], rel=1e-6 if kind is torch.optim.SGD else 5e-4)


def test_a_schedule_changes_the_rate_that_the_graph_reads():
    model, opt, train_step = build(torch.optim.SGD)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    rate = opt.param_groups[0]["lr"]
    address = rate.data_ptr()
    for expected in (1e-2, 5e-3, 2.5e-3):
        assert rate.item() == pytest.approx(expected)
        step(*batch())
        sched.step()
    opt.param_groups[0]["lr"] = 0.125  # as code of the user's own writes it
    given = batch()
    with perfdoctor.sync_guard(budget=0):
        step(*given)
    assert opt.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125
    assert rate.data_ptr() == address
    assert step.num_graphs == 1


def test_another_shape_is_a_graph_at_its_second_coming_and_the_cap_holds():
    model, opt, train_step = build()
    step = graphed_step(train_step, *batch(6), model=model, optimizer=opt, max_graphs=2)
    step(*batch(4))
    assert (step.num_graphs, step.num_eager) == (1, 1)
    step(*batch(4))
    assert (step.num_graphs, step.num_eager) == (2, 1)
    step(*batch(3))
    with pytest.warns(GraphLimitWarning, match="shape"):
        step(*batch(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        step(*batch(3))
    assert (step.num_graphs, step.num_eager, step.num_replays) == (2, 4, 1)


def test_a_guard_around_the_loop_lets_a_new_graph_be_made():
    model, opt, train_step = build()
    train_step(*batch())  # the optimizer's counters are on the host now
    wide, narrow = batch(6), batch(4)
    with perfdoctor.sync_guard(budget=0):
        step = graphed_step(train_step, *wide, model=model, optimizer=opt)
        for _ in range(2):
            step(*narrow)
    assert step.num_graphs == 2


def test_weight_decay_and_train_mode_are_other_graphs():
    model, opt, train_step = build(weight_decay=0.0)
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    opt.param_groups[0]["weight_decay"] = 0.1
    step(*batch())
    assert step.num_eager == 1
    opt.param_groups[0]["weight_decay"] = 0.0
    model.eval()
    step(*batch())
    assert step.num_eager == 2
    model.train()
    step(*batch())
    assert step.num_replays == 1


def test_numbers_of_torchs_modules_are_other_graphs():
    model, opt, train_step = build()
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    step(*batch())
    for change, value in (("p", 0.5), ("p", 0.3)):
        setattr(model[2], change, value)
        replays = step.num_replays
        step(*batch())
        assert step.num_replays == replays + (value == 0.3)
    model[1].momentum = 0.2
    eager = step.num_eager
    step(*batch())
    assert step.num_eager == eager + 1


def test_a_schedule_that_makes_every_step_new_is_told():
    model, opt, train_step = build()
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=99)  # cycles the betas too
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(20):
            step(*batch())
            sched.step()
    assert [row.category for row in told] == [GraphLimitWarning]
    assert "another number in a param group came" in str(told[0].message)
    assert "calls were each of a kind that had not come before" in str(told[0].message)
    assert told[0].filename == __file__


def test_odd_batches_now_and_then_are_no_alarm():
    model, opt, train_step = build()
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    for rows in range(2, 22):
        step(*batch(rows)) if rows != 6 else None
        step(*batch())
    assert step.num_replays == 20


def test_a_loaded_checkpoint_is_followed():
    model, opt, train_step = build()
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    assert step.num_graphs == 1
    step(*batch())
    assert step.num_graphs == 0  # its state tensors are others now
    step(*batch())
    assert step.num_graphs == 1
    assert all(group["capturable"] for group in opt.param_groups)


def test_a_tensor_of_the_surrounding_code_that_is_bound_anew_is_no_stale_read():
    model, opt, train_step = build()
    x, y = batch()

    def without_arguments():
        return train_step(x, y)

    step = graphed_step(without_arguments, model=model, optimizer=opt, max_graphs=1)
    step()
    assert (step.num_replays, step.num_eager) == (1, 0)
    x.copy_(batch(seed=4)[0])  # in place: the graph reads it
    step()
    assert (step.num_replays, step.num_eager) == (2, 0)
    x, kept = batch(seed=5)[0], x
    step()
    assert (step.num_replays, step.num_eager) == (2, 1)
    with pytest.warns(GraphLimitWarning, match="changed outside"):
        step()
    x = kept
    step()
    assert (step.num_replays, step.num_eager) == (3, 2)


def test_a_number_of_the_surrounding_code_is_never_frozen_in_silence():
    model, opt, train_step = build()
    model.temperature = 1.0
    weight = 1.0

    def weighted(x, y):
        return train_step(x, y) * weight / model.temperature

    step = graphed_step(weighted, *batch(), model=model, optimizer=opt, max_graphs=1)
    step(*batch())
    weight = 0.5
    step(*batch())
    assert (step.num_replays, step.num_eager) == (1, 1)
    with pytest.warns(GraphLimitWarning, match="changed outside"):
        step(*batch())
    weight = 1.0
    step(*batch())
    assert (step.num_replays, step.num_eager) == (2, 2)
    model.temperature = 2.0
    step(*batch())
    assert (step.num_replays, step.num_eager) == (2, 3)


def test_a_loop_counter_named_like_a_method_is_no_number_that_the_step_reads():
    model, opt, train_step = build()
    source = "def renamed(x, y):\n    return stepper(x, y), opt.STEP\n"
    opt.STEP = None
    space = {"stepper": train_step, "opt": opt, "STEP": 0}
    exec(compile(source, __file__, "exec"), space)
    step = graphed_step(space["renamed"], *batch(), model=model, optimizer=opt)
    for space["STEP"] in range(3):
        step(*batch())
    assert (step.num_replays, step.num_eager) == (3, 0)


def test_a_counter_that_the_step_changes_itself_does_not_keep_it_from_replaying():
    model, opt, train_step = build()
    model.calls = 0

    def counting(x, y):
        model.calls += 1
        return train_step(x, y)

    with pytest.warns(FrozenStateWarning, match="calls"):
        step = graphed_step(counting, *batch(), model=model, optimizer=opt)
    assert model.calls == 0
    step(*batch(3))  # eagerly: it counts
    step(*batch())
    assert (step.num_replays, step.num_eager) == (1, 1)


def test_kept_losses_stay_what_they_were():
    model, opt, train_step = build()
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    losses = [step(*batch(seed=i)) for i in range(5)]
    assert len({loss.item() for loss in losses}) == 5
    assert all(not loss.requires_grad for loss in losses)


def test_release_gives_the_optimizer_its_own_form_back():
    model, opt, train_step = build()
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    step(*batch())
    step.release()
    assert opt.param_groups[0]["capturable"] is False
    assert opt.param_groups[0]["lr"] == pytest.approx(1e-2)
    assert all(row["step"].device.type == "cpu" for row in opt.state.values())
    train_step(*batch())


def test_model_and_optimizer_are_found_where_they_are_not_given():
    model, opt, train_step = build()
    step = graphed_step(train_step, *batch())
    assert step._parts.models == (model,)
    assert step._parts.optimizers == (opt,)


Pair = namedtuple("Pair", "a b")


@dataclass(frozen=True)
class Item:
    x: torch.Tensor
    note: str


def test_a_batch_may_be_nested_and_plain_values_are_part_of_the_key():
    device = torch.device("cuda", 0)
    x = torch.ones(2, 3).cuda()
    nested = ({"p": Pair(x, 1), "q": [x, None]}, Item(x, "one"))
    tensors, key = batch_key(nested, device)
    assert len(tensors) == 3
    assert batch_key(({"p": Pair(x * 2, 1), "q": [x, None]}, Item(x, "one")), device)[1] == key
    for other in (
        ({"p": Pair(x, 2), "q": [x, None]}, Item(x, "one")),
        ({"p": Pair(x, True), "q": [x, None]}, Item(x, "one")),
        ({"p": Pair(x, 1), "q": [x, None]}, Item(x, "two")),
        ({"p": Pair(x[:1], 1), "q": [x, None]}, Item(x, "one")),
        ({"p": Pair(x.half(), 1), "q": [x, None]}, Item(x, "one")),
        ({"p": Pair(x.t().contiguous().t(), 1), "q": [x, None]}, Item(x, "one")),
    ):
        assert batch_key(other, device)[1] != key
    doubled = map_tensors(nested, lambda t, path: t * 2, "batch", [])
    assert isinstance(doubled[0]["p"], Pair)
    assert doubled[1].note == "one"
    assert torch.equal(doubled[1].x, x * 2)
    paths = []
    map_tensors(nested, lambda t, path: paths.append(path), "batch", [])
    assert paths == ["batch[0]['p'][0]", "batch[0]['q'][0]", "batch[1].x"]


def test_as_a_treatment():
    model, opt, train_step = build()
    loop = Loop(device=torch.device("cuda", 0), model=model, optimizers=(opt,), train_step=train_step)
    assert "sample batch" in GRAPHED_STEP.refuses(loop)
    assert "whole step" in GRAPHED_STEP.refuses(Loop(device=torch.device("cuda", 0)))
    full = Loop(
        device=torch.device("cuda", 0), model=model, optimizers=(opt,), train_step=train_step, sample_batch=batch()
    )
    with GRAPHED_STEP.applied(full) as treated:
        treated.train_step(*batch())
        assert opt.param_groups[0]["capturable"] is True
    assert opt.param_groups[0]["capturable"] is False
    assert not GRAPHED_STEP.numerics.bitwise
