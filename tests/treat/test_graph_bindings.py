"""graph_obstacles on what a step, and the loop around it, binds anew: gradients and memory."""

import pytest
import torch
from graph_parts import found_in, line_of, parts
from torch import nn

from perfdoctor.treat.graph_obstacles import graph_obstacles

HERE = __file__


def found(step, *batch):
    return found_in(HERE, graph_obstacles(step, *batch))


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def by_attribute(model, opt):
    def step(x, y):
        opt.zero_grad()
        loss_of(model, x, y).backward()
        for p in model.parameters():
            p.grad = p.grad * 0.5  # here
        opt.step()

    return step


def by_name(model, opt):
    def step(x, y):
        opt.zero_grad()
        gradients = torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            setattr(p, "grad", gradient)  # noqa: B010  # here
        opt.step()

    return step


def from_none(model, opt):
    def step(x, y):
        gradients = torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = None
            p.grad = gradient  # here
        opt.step()

    return step


def memory_swapped(model, opt):
    def step(x, y):
        opt.zero_grad()
        loss_of(model, x, y).backward()
        opt.step()
        model[0].weight.data = model[0].weight.data.clamp(-1, 1)  # here

    return step


def buffer_swapped(model, opt):
    def step(x, y):
        opt.zero_grad()
        loss_of(model, x, y).backward()
        opt.step()
        model[1].running_mean.set_(model[1].running_mean * 0.5)  # here

    return step


REBINDING = [
    (by_attribute, "capture-grad-rebound"), (by_name, "capture-grad-rebound"), (from_none, "capture-grad-rebound"),
    (memory_swapped, "capture-python-state"), (buffer_swapped, "capture-python-state"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "code"), REBINDING)
def test_what_the_step_binds_anew_is_named(device, make, code):
    model, opt, x, y = parts(device)
    values = [p.detach().clone() for p in model.parameters()]
    addresses = [p.data_ptr() for p in model.parameters()]
    assert found(make(model, opt), x, y) == [(code, line_of(make, "# here"))]
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), values, strict=True))
    assert all(p.grad is None for p in model.parameters())


class Box:
    grad = 0.0


def cleared_by_a_variable(model, opt):
    nothing = None

    def step(x, y):
        for p in model.parameters():
            p.grad = nothing
        loss_of(model, x, y).backward()
        opt.step()

    return step


def another_grad(model, opt):
    def step(x, y):
        box = Box()
        opt.zero_grad()
        loss_of(model, x, y).backward()
        box.grad = 1.0
        opt.step()

    return step


def on_one_line(model, opt):
    return lambda x, y: (opt.zero_grad(), loss_of(model, x, y).backward(), opt.step())


def in_a_closure(model, opt):
    def step(x, y):
        def closure():
            opt.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        return opt.step(closure)

    return step


def accumulated(model, opt):
    def step(x, y):
        opt.zero_grad(set_to_none=False)
        for rows, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
            loss_of(model, rows, wanted).backward()
        for p in model.parameters():
            p.grad.mul_(0.5)
        opt.step()

    return step


@pytest.mark.parametrize("make", [cleared_by_a_variable, another_grad, on_one_line, in_a_closure, accumulated])
def test_what_is_no_rebinding(device, make):
    model, opt, x, y = parts(device)
    assert found(make(model, opt), x, y) == []


def without_zeroing(model, opt):
    def step(x, y):
        loss_of(model, x, y).backward()
        opt.step()

    return step


@pytest.mark.parametrize("drop", ["optimizer", "model", "parameters", "in place"])
def test_gradients_that_the_loop_drops(device, drop):
    model, opt, x, y = parts(device)
    step = without_zeroing(model, opt)
    for number in range(2):
        result = graph_obstacles(step, x, y)
        if drop == "optimizer":
            opt.zero_grad(set_to_none=True)  # optimizer
        elif drop == "model":
            model.zero_grad()  # model
        elif drop == "parameters":
            for p in model.parameters():
                p.grad = None  # parameters
        elif number:
            opt.zero_grad(set_to_none=False)
    me = test_gradients_that_the_loop_drops
    # The source is read, whatever branch runs.
    marks = [line_of(me, mark) for mark in ("# optimizer", "# model", "# parameters")]
    assert found_in(HERE, result) == [("capture-grad-rebound", line) for line in marks]
    assert result.graphable  # graphed_step binds them again


def test_a_step_that_zeroes_leaves_the_loop_free(device):
    model, opt, x, y = parts(device)
    step = in_a_closure(model, opt)
    for _ in range(2):
        result = graph_obstacles(step, x, y)
        opt.zero_grad(set_to_none=True)
    assert list(result) == []
