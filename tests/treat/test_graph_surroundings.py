"""graph_obstacles on what surrounds a step: gradients, optimizers, schedules, loaders, a GradScaler."""

import warnings
from functools import partial

import pytest
import torch
from graph_parts import found_in, line_of, parts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfdoctor.treat.graph_obstacles import graph_obstacles

found = partial(found_in, __file__)


def test_gradients_bound_anew(device):
    model, opt, x, y = parts(device)

    def train_step(x, y):
        for p in model.parameters():
            p.grad = None
        nn.functional.mse_loss(model(x), y).backward()
        for p in model.parameters():
            p.grad = p.grad * 0.5
        opt.step()

    assert found(graph_obstacles(train_step, x, y)) == [("capture-grad-rebound", line_of(train_step, "* 0.5"))]


def test_optimizers_and_schedules_are_named_where_they_are_built(device):
    model, _, x, y = parts(device)
    first, second = nn.Linear(4, 2).to(device), nn.Linear(4, 2).to(device)
    adam = torch.optim.Adam(first.parameters(), lr=0.1)
    sgd = torch.optim.SGD(second.parameters(), lr=0.1)
    lbfgs = torch.optim.LBFGS(model.parameters())
    sched = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.9)

    def train_step(x, y):
        for opt in (adam, sgd):
            opt.zero_grad()
        (first(x) + second(x) - y).square().sum().backward()
        adam.step()
        sgd.step()

    result = graph_obstacles(train_step, x, y)
    sched.step()
    me = test_optimizers_and_schedules_are_named_where_they_are_built
    assert found(result) == [
        ("capture-optimizer", line_of(me, "adam = ")),
        ("capture-baked-value", line_of(me, "    sched.step()")),
    ]
    assert result.graphable  # graphed_step takes care of both
    result = graph_obstacles(lambda x, y: model(x).sum().backward(), x, y, optimizer=lbfgs)
    (row,) = [row for row in result if row.code == "capture-optimizer"]
    assert row.severity == "stops"
    assert row.site.frame.line == line_of(me, "lbfgs = ")


def test_a_loader_that_pins_where_there_is_a_gpu(device):
    model, opt, x, y = parts(device)
    data, pinned = TensorDataset(torch.zeros(8, 4)), True
    asked = DataLoader(data, batch_size=2, pin_memory=device == "cuda")
    never = DataLoader(data, batch_size=2, pin_memory=not pinned)

    def train_step(x, y):
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()

    result = graph_obstacles(train_step, x, y)
    me = test_a_loader_that_pins_where_there_is_a_gpu
    assert found(result) == [("capture-other-thread", line_of(me, "asked = "))]
    assert (asked.pin_memory, never.pin_memory) == (device == "cuda", False)


def test_a_loader_that_pins(device):
    if device == "cpu":
        pytest.skip("without a device nothing is pinned")
    model, opt, x, y = parts(device)
    loader = DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=2, pin_memory=True)
    plain = DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=2)

    def train_step(x, y):
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()

    assert plain is not loader
    result = graph_obstacles(train_step, x, y)
    assert found(result) == [("capture-other-thread", line_of(test_a_loader_that_pins, "loader = "))]
    assert "thread_local" in str(result)

    iterator = iter(plain)

    def drawing():
        (rows,) = next(iterator)
        model(rows.to("cuda")).sum().backward()

    codes = dict.fromkeys(row.code for row in graph_obstacles(drawing) if "draws a batch" in row.text)
    assert list(codes) == ["capture-python-state"]


def test_grad_scaler_waits(device):
    model, opt, x, y = parts(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        scaler = torch.amp.GradScaler("cuda")

    def train_step(x, y):
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    # Without a GPU torch switches the scaler off; on a GPU it would be on, and that is what is asked about.
    before = dict(vars(scaler))
    rows = found(graph_obstacles(train_step, x, y), "capture-sync")
    assert rows == [("capture-sync", line_of(train_step, "scaler.step"))]
    assert device == "cuda" or vars(scaler) == before


def test_a_grad_scaler_that_the_user_switched_off(device):
    model, opt, x, y = parts(device)
    use_amp = False
    named, constant = torch.amp.GradScaler("cuda", enabled=use_amp), torch.amp.GradScaler("cuda", enabled=False)

    def train_step(x, y):
        loss = constant.scale(named.scale(nn.functional.mse_loss(model(x), y)))
        loss.backward()
        named.step(opt)
        constant.update()
        opt.zero_grad()

    assert found(graph_obstacles(train_step, x, y), "capture-sync") == []
