"""What graphed_step refuses: the line, the change, and everything as it was."""

import random

import pytest
import torch
from graphed_parts import batch, build, numbers, same
from torch import nn

from perfdoctor.errors import TreatmentRefused, UsageError
from perfdoctor.treat import graph_failure
from perfdoctor.treat.graphed_step import FrozenStateWarning, graphed_step

pytestmark = pytest.mark.usefixtures("emulated")


def refused(match, train_step, *given, **options):
    with pytest.raises(TreatmentRefused, match=match) as caught:
        graphed_step(train_step, *given, **options)
    return str(caught.value)


def test_a_step_that_waits_is_refused_with_its_line_and_nothing_has_changed():
    model, opt, train_step = build()

    def reading(x, y):
        loss = train_step(x, y)
        return loss.item()

    before, rate = numbers(model), torch.get_rng_state()
    text = refused("waits for the device", reading, *batch(), model=model, optimizer=opt)
    assert f"{__file__}:{reading.__code__.co_firstlineno + 2}: item" in text
    assert same(before, numbers(model))
    assert torch.equal(rate, torch.get_rng_state())
    assert opt.param_groups[0]["lr"] == 1e-2
    assert opt.param_groups[0]["capturable"] is False
    assert not opt.state
    assert not opt._optimizer_load_state_dict_post_hooks


def test_an_error_in_the_step_names_its_line_and_leaves_everything_as_it_was():
    model, opt, train_step = build()
    calls = []

    def failing(x, y):
        loss = train_step(x, y)
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("seven")
        return loss

    before = numbers(model)
    text = refused("ValueError: seven", failing, *batch(), model=model, optimizer=opt)
    assert f"{__file__}:{failing.__code__.co_firstlineno + 4}" in text
    assert same(before, numbers(model))
    assert calls == []
    assert not opt.state


def test_interrupts_pass_and_restore():
    model, opt, train_step = build()

    def interrupted(x, y):
        train_step(x, y)
        raise KeyboardInterrupt

    before = numbers(model)
    with pytest.raises(KeyboardInterrupt):
        graphed_step(interrupted, *batch(), model=model, optimizer=opt)
    assert same(before, numbers(model))
    assert not opt.state


def test_python_counters_are_named_and_put_back():
    model, opt, train_step = build()
    holder = {"calls": 0}

    def counting(x, y):
        holder["calls"] += 1
        return train_step(x, y)

    with pytest.warns(FrozenStateWarning, match="holder"):
        graphed_step(counting, *batch(), model=model, optimizer=opt)
    assert holder["calls"] == 0


def test_host_randomness_is_refused():
    model, opt, train_step = build()

    def drawing(x, y):
        return train_step(x * (1 if random.random() < 0.5 else 2), y)

    refused("random numbers on the host", drawing, *batch(), model=model, optimizer=opt)


def test_refusals_name_the_change():
    model, opt, train_step = build()
    x, y = batch()
    refused("batch\\[0\\] is in host memory.*DevicePrefetcher", train_step, x.cpu(), y, model=model, optimizer=opt)
    refused("a graph cannot see", train_step, object(), y, model=model, optimizer=opt)
    refused("requires a gradient", train_step, x.clone().requires_grad_(), y, model=model, optimizer=opt)
    refused("no parameters found", lambda: torch.ones(1, device="cuda"))
    lbfgs = torch.optim.LBFGS(model.parameters())
    refused("LBFGS", train_step, x, y, model=model, optimizer=lbfgs)
    refused("no capturable form", train_step, x, y, model=model, optimizer=torch.optim.Adagrad(model.parameters()))
    damped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    refused("dampening", train_step, x, y, model=model, optimizer=damped)
    scaler = torch.amp.GradScaler("cuda")

    def scaled(x, y):
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        scaler.step(opt)
        scaler.update()

    refused("GradScaler", scaled, x, y, model=model, optimizer=opt)
    mixed = nn.ModuleList([model, nn.Linear(2, 2, device="meta")])
    refused("parameters are on", train_step, x, y, model=mixed, optimizer=opt)

    class DistributedDataParallel(nn.Module):
        """As far as a refusal looks: the real one needs a process group."""

        def __init__(self, module):
            super().__init__()
            self.module = module

    refused("eleven eager steps", train_step, x, y, model=DistributedDataParallel(model), optimizer=opt)

    def plain(x, y):
        train_step(x, y)
        return 0.5

    refused("return device tensors", plain, x, y, model=model, optimizer=opt)


def test_wrong_arguments():
    with pytest.raises(UsageError, match="function"):
        graphed_step(3)
    model, opt, train_step = build()
    with pytest.raises(UsageError, match="max_graphs=0"):
        graphed_step(train_step, *batch(), model=model, optimizer=opt, max_graphs=0)
    step = graphed_step(train_step, *batch(), model=model, optimizer=opt)
    with pytest.raises(TreatmentRefused, match="host memory"):
        step(*(t.cpu() for t in batch()))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("CUDA error: operation not permitted when stream is capturing", "keep the value on the device"),
        ("Attempting CUDA graph capture of step() for an instance of Adam but param_groups' capturable is False.",
         "capturable=True"),
        ("CUDA error: dependency created on uncaptured work in another stream", "loss.detach"),
        ("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.",
         "on the device"),
        ("CUDA error: operation failed due to a previous error during capture", "graph_obstacles"),
    ],
)  # fmt: skip
def test_what_cuda_says_is_put_in_plain_words(message, change):
    assert change in graph_failure.explained(message)[1]


def test_without_any_device_it_says_so():
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TreatmentRefused, match="parameters are on cpu"):
        graphed_step(lambda x: model(x), torch.ones(1, 2), model=model, optimizer=opt)


@pytest.mark.parametrize("enabled", [True, False])
def test_casts_that_outlive_an_update_are_refused(enabled):
    """The cache of an outer region outlives the step, also where that region itself casts nothing."""
    model, opt, train_step = build()
    with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
        refused("cache_enabled=False", train_step, *batch(), model=model, optimizer=opt)
    with torch.autocast("cuda", torch.bfloat16, enabled=enabled, cache_enabled=False):
        graphed_step(train_step, *batch(), model=model, optimizer=opt)
