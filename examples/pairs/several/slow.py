"""A denoising autoencoder with several ailments: a pageable copy, a read of the loss, and an average kept in a loop."""

import copy
import os

import torch
from torch import nn
from torch.nn import functional as F

STEPS = int(os.environ.get("STEPS", "60"))
BATCH, SIZE, WIDTH = 96, 128, 48
device = torch.device("cuda")
torch.manual_seed(17)
torch.backends.cudnn.benchmark = True


def stage(before, after, layer=nn.Conv2d, **how):
    return nn.Sequential(layer(before, after, 4, 2, 1, **how), nn.GroupNorm(8, after), nn.SiLU())


def refine(width):
    return [nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()) for _ in range(3)]


model = nn.Sequential(
    stage(3, WIDTH), *refine(WIDTH),
    stage(WIDTH, 2 * WIDTH), *refine(2 * WIDTH),
    stage(2 * WIDTH, 4 * WIDTH), *refine(4 * WIDTH),
    stage(4 * WIDTH, 2 * WIDTH, nn.ConvTranspose2d), *refine(2 * WIDTH),
    stage(2 * WIDTH, WIDTH, nn.ConvTranspose2d), *refine(WIDTH),
    nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1),
).to(device)  # fmt: skip
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, fused=True)
pool = [torch.rand(BATCH, 3, SIZE, SIZE) for _ in range(6)]
losses = []
for step in range(STEPS):
    clean = pool[step % len(pool)].to(device)  # GUILTY: h2d_pageable
    noisy = clean + 0.1 * torch.randn_like(clean)
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.mse_loss(model(noisy).float(), clean)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())  # GUILTY: item
    with torch.no_grad():
        for kept, new in zip(average.parameters(), model.parameters(), strict=True):
            kept.mul_(0.999).add_(new, alpha=0.001)  # GUILTY: ema_loop
print(f"last loss {float(losses[-1]):.4f}")
