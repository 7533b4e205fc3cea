"""graph_obstacles tells draws of the host from those of the device, and leaves every generator as it was."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from graph_parts import found_in, line_of, parts
from torch import nn
from torch.utils.checkpoint import checkpoint

from perfdoctor.treat.graph_breaks import graph_breaks
from perfdoctor.treat.graph_obstacles import graph_obstacles

found = partial(found_in, __file__)


def trained(model, opt, out, y):
    opt.zero_grad()
    nn.functional.mse_loss(out, y).backward()
    opt.step()


def layer_drop(model, opt):
    def step(x, y):
        if torch.rand(1).item() < 0.5:  # drawn
            x = x * 2
        trained(model, opt, model(x), y)

    return step


def branch_on_a_tensor(model, opt):
    def step(x, y):
        x = x * 2 if torch.rand(()) < 0.5 else x  # drawn
        trained(model, opt, model(x), y)

    return step


def beside_a_draw_of_the_device(model, opt):
    def step(x, y):
        x = x + torch.rand_like(x) * float(torch.rand(())) + torch.randn(4, device=x.device)  # drawn
        trained(model, opt, model(x), y)

    return step


def own_generator(model, opt):
    generator = torch.Generator().manual_seed(5)

    def step(x, y):
        trained(model, opt, model(x * float(torch.rand((), generator=generator))), y)  # drawn

    return step


def distribution_without_a_device(model, opt):
    beta = torch.distributions.Beta(0.4, 0.4)

    def step(x, y):
        share = beta.sample()  # drawn
        trained(model, opt, model(x * share), y)

    return step


@pytest.mark.parametrize(
    "make", [layer_drop, branch_on_a_tensor, beside_a_draw_of_the_device, own_generator, distribution_without_a_device]
)
def test_a_draw_of_torch_on_the_host(device, make):
    model, opt, x, y = parts(device)
    step = make(model, opt)
    before = torch.get_rng_state()
    assert found(graph_obstacles(step, x, y), "capture-python-state") == [
        ("capture-python-state", line_of(make, "# drawn"))
    ]
    assert torch.equal(torch.get_rng_state(), before)


def every_way(model, x):
    noise = torch.randn(6, 4, device=x.device) + torch.empty_like(x).normal_()
    noise = noise + torch.normal(0.0, 1.0, (6, 4), device=x.device) + torch.bernoulli(torch.full_like(x, 0.5))
    order = torch.randperm(6, device=x.device)
    with torch.device(x.device):
        scale = torch.rand(4)
    return model(nn.functional.dropout(x, 0.1)[order] + noise * scale)


def recomputed(model, x):
    return checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize("forward", [every_way, recomputed])
def test_draws_of_the_device_are_none_of_the_host(device, forward):
    model, opt, x, y = parts(device)
    assert found(graph_obstacles(lambda x, y: trained(model, opt, forward(model, x), y), x, y)) == []


def recurrent(device):
    return nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True).to(device)


def attention(device):
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).to(device)


@pytest.mark.parametrize("build", [recurrent, attention])
def test_dropout_inside_torchs_layers(device, build):
    model = build(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        out = model(x)
        trained(model, opt, out[0] if isinstance(out, tuple) else out, torch.zeros_like(x))

    assert found(graph_obstacles(step, torch.ones(3, 5, 4, device=device))) == []


@pytest.mark.parametrize("watch", [graph_obstacles, graph_breaks])
def test_generators_of_the_step_are_as_before(watch):
    numpys, old, pythons = np.random.default_rng(1), np.random.RandomState(2), random.Random(3)
    torchs = torch.Generator().manual_seed(4)
    model = nn.Linear(4, 2)

    def step(x):
        scale = numpys.random() + old.rand() + pythons.random() + torch.rand((), generator=torchs).item()
        return model(x * scale).sum()

    def states():
        return (
            repr(numpys.bit_generator.state), repr(old.get_state()), pythons.getstate(), torchs.get_state().tolist(),
        )  # fmt: skip

    before = states()
    watch(step, torch.ones(3, 4))
    assert states() == before


def test_a_host_tensor_that_counts():
    import perfdoctor

    with perfdoctor.emulate_cuda():
        model, opt, x, y = parts("cuda")
        steps = torch.zeros(())

        def step(x, y):
            steps.add_(1)
            trained(model, opt, model(x) / (1 + 1 / steps), y)

        assert found(graph_obstacles(step, x, y)) == [("capture-python-state", line_of(step, "steps.add_"))]
        assert steps.item() == 0
