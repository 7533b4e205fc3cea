"""What the tests of graphed_step share: a model with its optimizer and step, batches, and numbers to compare."""

import torch
from torch import nn


def build(optimizer=torch.optim.AdamW, seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)).cuda()
    opt = optimizer(model.parameters(), **{"lr": 1e-2, **options})

    def train_step(x, y):
        opt.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss

    return model, opt, train_step


def batch(rows=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator).cuda(), torch.randn(rows, 2, generator=generator).cuda()


def numbers(model):
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


CAPTURABLE = [
    (torch.optim.AdamW, {}), (torch.optim.Adam, {"foreach": True}), (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {}), (torch.optim.NAdam, {}), (torch.optim.RAdam, {}), (torch.optim.RMSprop, {}),
    (torch.optim.Adadelta, {}), (torch.optim.Adamax, {}), (torch.optim.ASGD, {}), (torch.optim.Rprop, {}),
]  # fmt: skip
