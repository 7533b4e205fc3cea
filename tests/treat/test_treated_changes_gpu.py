"""On a GPU: graphs over what the first step made, draws on the host, modules that change, skipped first updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from perfdoctor.errors import TreatmentRefused
from perfdoctor.treat.graph_optimizers import make_capturable
from perfdoctor.treat.graphed_step import graphed_step
from perfdoctor.treat.nonfinite import NonFiniteWatch
from perfdoctor.watch.sync_guard import sync_guard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node"),  # warm-up and capture use streams of their own
]
FEATURES = 4096  # a mask of 16 KB, which the allocator hands to the next who asks


class _Masked(nn.Module):
    """Makes its mask in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 2)
        self.mask: Any = None
        self.scales: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(FEATURES, device=x.device)
            self.scales["in"] = torch.full((FEATURES,), 0.5, device=x.device)
            self.register_buffer("shift", torch.ones(FEATURES, device=x.device), persistent=False)
        out: torch.Tensor = self.inner(x * self.mask * self.scales["in"] + self.shift)
        return out


def _trained(graphed: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = _Masked().cuda()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    make_capturable(opt)
    generator = torch.Generator(device="cuda").manual_seed(7)
    given = [torch.randn(4, FEATURES, device="cuda", generator=generator) for _ in range(6)]

    def train_step(x: torch.Tensor) -> torch.Tensor:
        opt.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss

    step: Any = graphed_step(train_step, given[0], model=model, optimizer=opt) if graphed else train_step
    losses, taken = [], []
    for x in given:
        taken += [torch.full((FEATURES,), float("nan"), device="cuda") for _ in range(32)]  # whatever memory is free
        losses.append(step(x).detach())
    return torch.stack(losses)


def test_a_graph_reads_a_mask_that_its_first_step_made() -> None:
    eager, graphed = _trained(graphed=False), _trained(graphed=True)
    assert torch.isfinite(graphed).all()
    assert torch.equal(eager, graphed)


def test_a_draw_from_torchs_host_generator_is_refused_and_taken_back() -> None:
    model = nn.Linear(4, 2).cuda()
    opt = torch.optim.AdamW(model.parameters())

    def train_step(x: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = model(x * float(torch.rand(()))).sum()
        loss.backward()
        opt.step()
        return loss

    before = torch.get_rng_state()
    with pytest.raises(TreatmentRefused, match="torch's host generator"):
        graphed_step(train_step, torch.ones(2, 4, device="cuda"), model=model, optimizer=opt)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_that_takes_the_place_of_another_is_the_one_that_is_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).cuda()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, device="cuda")

    def train_step(x: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss

    step = graphed_step(train_step, x, model=model, optimizer=opt)
    step(x)
    last = nn.Linear(8, 2).cuda()
    model[1] = last
    opt.add_param_group({"params": list(last.parameters())})
    for _ in range(4):
        before = last.weight.detach().clone()
        with torch.no_grad():
            expected = model(x).square().mean()
        assert torch.allclose(step(x), expected)
        assert not torch.equal(last.weight, before)
    assert (step.num_graphs, step.num_eager) == (1, 1)
    step.release()
    assert all(isinstance(group["lr"], float) for group in opt.param_groups)
    train_step(x)


def test_a_first_update_that_is_skipped_leaves_no_momentum_and_adds_no_sync() -> None:
    trained = []
    for num_bad in (0, 2):
        torch.manual_seed(0)
        model = nn.Linear(1000, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        steps = [torch.full((2, 1000), 1.0 + max(0, i - num_bad), device="cuda") for i in range(num_bad + 3)]
        torch.full((64, 1024), float("nan"), device="cuda")  # memory that is free again
        with NonFiniteWatch(model, on_hit="skip") as watch:
            for index, x in enumerate(steps):
                model(x).square().mean().backward()
                if index < num_bad:
                    assert model.weight.grad is not None
                    model.weight.grad[0, :1].fill_(float("inf"))
                with sync_guard(budget=0 if index else 1000):  # the first builds tables
                    opt.step()
                opt.zero_grad()
                watch.step()
        assert len(watch.hits) == num_bad
        trained.append([t.detach() for t in (*model.parameters(), *(s["momentum_buffer"] for s in opt.state.values()))])
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))
