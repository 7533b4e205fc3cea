"""graph_obstacles on values that the loop around a step changes and the step reads."""

import pytest
import torch
from graph_parts import found_in, line_of, parts
from torch import nn

from perfdoctor.treat.graph_obstacles import graph_obstacles


def found(result):
    return found_in(__file__, result)


class Scaled(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.tau, self.unread = body, 1.0, 1.0
        self.mask = None

    def forward(self, x):
        out = self.body(x) / self.tau
        return out if self.mask is None else out * self.mask


def trained(model, opt, factor=None):
    def step(x, y):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        (loss if factor is None else loss * factor["weight"]).backward()
        opt.step()
        return loss

    return step


def test_attributes_items_and_numbers_of_torchs_modules(device):
    body, opt, x, y = parts(device)
    net, factor, seen = Scaled(body), {"weight": 1.0}, {"steps": 0}
    step = trained(net, opt, factor)
    for number in range(2):
        result = graph_obstacles(step, x, y)
        net.tau = 1.0 / (number + 1)
        factor["weight"] *= 0.5
        net.body[2].p = 0.1 * number
        net.body[1].momentum, net.unread = 0.2, 2.0
        seen["steps"] += 1
        net.mask = torch.ones(2, device=x.device)
        net.train(number == 0)
    me = test_attributes_items_and_numbers_of_torchs_modules
    wanted = [line_of(me, t) for t in ("net.tau = ", "factor[", "net.body[2].p", "net.body[1].mom", "net.mask = ")]
    # The mask was None when the first graph_obstacles ran; the last one saw a tensor.
    assert found(result) == [("capture-baked-value", line) for line in wanted]
    assert {row.severity for row in result} == {"silent"}


class Trainer:
    def __init__(self, device):
        self.model, self.opt, self.x, self.y = parts(device)
        self.weight = 1.0
        self.shown = 0

    def step(self, x, y):
        self.opt.zero_grad()
        (nn.functional.mse_loss(self.model(x), y) * self.weight).backward()
        self.opt.step()

    def train(self):
        for _ in range(2):
            result = graph_obstacles(self.step, self.x, self.y)
            self.weight *= 0.5
            self.shown += 1
        return result


def test_an_attribute_of_the_trainer(device):
    trainer = Trainer(device)
    assert found(trainer.train()) == [("capture-baked-value", line_of(Trainer, "self.weight *="))]
    assert trainer.weight == 0.25


def test_what_is_set_before_the_loop_is_no_change(device):
    body, opt, x, y = parts(device)
    net = Scaled(body)
    net.tau = 2.0
    net.body[2].p = 0.3
    assert found(graph_obstacles(trained(net, opt), x, y)) == []


@pytest.mark.parametrize("cycled", [True, False])
def test_a_schedule_of_more_than_the_rate(device, cycled):
    model, _, x, y = parts(device)
    rate = torch.tensor(0.1, device=x.device)
    opt = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=9, cycle_momentum=cycled)
    result = graph_obstacles(trained(model, opt), x, y)
    sched.step()
    me = test_a_schedule_of_more_than_the_rate
    assert found(result) == ([("capture-baked-value", line_of(me, "    sched.step()"))] if cycled else [])


def test_numbers_of_param_groups_however_they_are_written(device):
    model, opt, x, y = parts(device)
    result = graph_obstacles(trained(model, opt), x, y)
    opt.param_groups[0].update(lr=0.5)
    opt.param_groups[0].update({"lr": 0.5, "params": opt.param_groups[0]["params"]})
    opt.param_groups[0]["lr"], opt.param_groups[0]["initial_lr"] = 0.1, 0.2
    for group in opt.param_groups:
        group["weight_decay"] = 0.1
    me = test_numbers_of_param_groups_however_they_are_written
    silent = [("capture-baked-value", line_of(me, 'group["weight_decay"]'))]
    rates = [line_of(me, t) for t in ("update(lr", 'update({"lr"', '["initial_lr"] =')]
    assert found(result) == silent + [("capture-baked-value", line) for line in rates]


def a_function_of_the_same_name(opt):
    def step(x, y):
        for group in opt.param_groups:
            group["lr"] = 0.0

    return step


def test_a_function_of_the_same_name_elsewhere_is_not_called(device):
    model, opt, x, y = parts(device)
    step = trained(model, opt)
    step(x, y) if device == "cpu" else None
    assert found(graph_obstacles(step, x, y)) == []


def test_values_in_the_batch_that_differ(device):
    model, opt, x, y = parts(device)

    def step(x, y, options):
        opt.zero_grad()
        (nn.functional.mse_loss(model(x), y) * options["weight"]).backward()
        opt.step()

    batches = [(x, y, {"weight": 0.4, "name": "a"}), (x, y, {"weight": 0.3, "name": "a"})]
    (row,) = graph_obstacles(step, *batches[0], batches=batches)
    assert (row.code, row.severity) == ("capture-baked-value", "silent")
    assert "batch[2]['weight'] is a Python value and differs from batch to batch (0.4, 0.3)" in row.text
    assert row.site.frame.line == line_of(step, "def step")
    assert list(graph_obstacles(step, *batches[0], batches=batches[:1])) == []
