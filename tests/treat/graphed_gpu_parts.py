"""What the tests of graphed_step on a GPU share: a network, its batches, its step and the losses of a run."""

import torch
from torch import nn

from perfdoctor.treat.graph_optimizers import make_capturable


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
