"""A bottleneck CNN that keeps the GPU busy: the pictures lie on it already, only the targets are copied."""

import os

import torch
from torch import nn
from torch.nn import functional as F

STEPS = int(os.environ.get("STEPS", "60"))
BATCH, SIZE, WIDTH = 640, 176, 256
device = torch.device("cuda")
torch.manual_seed(13)
torch.backends.cudnn.benchmark = True


class Bottleneck(nn.Module):
    def __init__(self, width):
        super().__init__()
        inner = width // 4
        self.path = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return F.relu(x + self.path(x), inplace=True)


layers = [nn.Conv2d(3, WIDTH, 4, 4), *[Bottleneck(WIDTH) for _ in range(6)]]
layers += [nn.Conv2d(WIDTH, 2 * WIDTH, 2, 2), *[Bottleneck(2 * WIDTH) for _ in range(4)]]
layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * WIDTH, 200)]
model = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
pictures = torch.randn(BATCH, 3, SIZE, SIZE, device=device).contiguous(memory_format=torch.channels_last)
targets = [torch.randint(0, 200, (BATCH,)) for _ in range(16)]
for step in range(STEPS):
    target = targets[step % 16].to(device)  # GUILTY: h2d_pageable
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(pictures), target)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
print(f"last loss {loss.item():.4f}")
