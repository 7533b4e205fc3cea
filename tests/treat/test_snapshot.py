"""Snapshot: everything a step changes comes back bit for bit, at the addresses it had."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import perfdoctor
from perfdoctor.treat.snapshot import Snapshot


def trained(device="cpu", steps=2, optimizer=torch.optim.AdamW):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).to(device)
    opt = optimizer(model.parameters(), lr=1e-2)
    for _ in range(steps):
        step(model, opt, device)
    return model, opt


def step(model, opt, device="cpu"):
    opt.zero_grad()
    x = torch.randn(5, 6, device=device)
    loss = model(x).square().mean() * (1 + random.random() + float(np.random.rand()))
    loss.backward()
    opt.step()
    return loss.detach().clone()


def seen(model, opt):
    """All numbers by a road that Snapshot does not take: state_dict and .grad."""
    state = opt.state_dict()
    return [
        *(t.clone() for t in model.state_dict().values()),
        *(None if p.grad is None else p.grad.clone() for p in model.parameters()),
        *(v.clone() for row in state["state"].values() for v in row.values()),
        [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]],
    ]


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


@pytest.mark.parametrize("steps", [0, 2])
def test_losses_after_a_restore_are_those_of_a_first_run(steps):
    model, opt = trained(steps=steps)
    addresses = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
    before = seen(model, opt)
    snapshot = Snapshot.take(model, opt)
    first = [step(model, opt) for _ in range(3)]
    opt.param_groups[0]["lr"] = 5.0
    model.eval()
    for _ in range(2):  # a snapshot can be restored more than once
        snapshot.restore()
        assert all(equal(a, b) for a, b in zip(before, seen(model, opt), strict=True))
        assert [t.data_ptr() for t in (*model.parameters(), *model.buffers())] == addresses
        assert len(opt.state) == (0 if steps == 0 else 6)
        again = [step(model, opt) for _ in range(3)]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_gradient_that_was_not_there_goes_and_one_that_was_comes_back():
    model, opt = trained(steps=1)
    parameters = list(model.parameters())
    parameters[0].grad = None
    kept = parameters[1].grad
    values = kept.clone()
    snapshot = Snapshot.take(model, opt)
    step(model, opt)
    kept.add_(1)
    snapshot.restore()
    assert parameters[0].grad is None
    assert parameters[1].grad is kept
    assert torch.equal(kept, values)


def test_rebound_memory_and_buffers_are_bound_again():
    model, opt = trained(steps=0)
    weight, norm = model[0].weight, model[1]
    address, mean, values = weight.data_ptr(), norm.running_mean, weight.detach().clone()
    snapshot = Snapshot.take(model, opt)
    weight.data = torch.zeros(8, 6)
    norm.running_mean = torch.ones(8)
    norm.register_buffer("extra", torch.ones(1))
    norm.eval()
    snapshot.restore()
    assert weight.data_ptr() == address
    assert torch.equal(weight, values)
    assert norm.running_mean is mean
    assert "extra" not in dict(norm.named_buffers())
    assert norm.training


def test_a_param_group_added_later_goes_again():
    model, opt = trained(steps=1)
    snapshot = Snapshot.take(model, opt)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    snapshot.restore()
    assert len(opt.param_groups) == 1


def test_bare_parameters_and_several_optimizers():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opts = [torch.optim.SGD([a], lr=1.0, momentum=0.9), torch.optim.Adam([b], lr=1.0)]
    snapshot = Snapshot.take([a, b], opts)
    for opt in opts:
        (a * b).sum().backward()
        opt.step()
    snapshot.restore()
    assert torch.equal(a, torch.ones(3))
    assert torch.equal(b, torch.ones(3))
    assert a.grad is None
    assert not opts[0].state
    assert not opts[1].state


def test_generators_of_the_users_own():
    generator = torch.Generator().manual_seed(5)
    snapshot = Snapshot.take(None, (), generators=[generator])
    drawn = [torch.rand(2, generator=generator), torch.rand(2), random.random(), np.random.rand()]
    snapshot.restore()
    again = [torch.rand(2, generator=generator), torch.rand(2), random.random(), np.random.rand()]
    assert torch.equal(drawn[0], again[0])
    assert torch.equal(drawn[1], again[1])
    assert drawn[2:] == again[2:]


def test_on_the_emulated_device_it_waits_for_nothing():
    with perfdoctor.emulate_cuda():
        model, opt = trained("cuda")
        before = [p.detach().clone() for p in model.parameters()]
        with perfdoctor.sync_guard(budget=0):
            snapshot = Snapshot.take(model, opt)
        step(model, opt, "cuda")
        with perfdoctor.sync_guard(budget=0):
            snapshot.restore()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
