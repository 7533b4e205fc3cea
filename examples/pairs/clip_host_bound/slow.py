"""A small mixer network: the host launches its many little kernels slower than the GPU runs them."""

import os

import torch
from torch import nn
from torch.nn import functional as F

STEPS = int(os.environ.get("STEPS", "60"))
BATCH, TOKENS, WIDTH, DEPTH = 32, 49, 128, 12
device = torch.device("cuda")
torch.manual_seed(11)


class MixerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(TOKENS, 2 * TOKENS), nn.GELU(), nn.Linear(2 * TOKENS, TOKENS))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.tokens(self.before(x).mT).mT
        return x + self.channels(self.between(x))


model = nn.Sequential(*[MixerBlock() for _ in range(DEPTH)], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
pool = [torch.randn(BATCH, TOKENS, WIDTH, device=device) for _ in range(8)]
labels = torch.randint(0, 10, (BATCH,), device=device)
norms = []
for step in range(STEPS):
    loss = F.cross_entropy(model(pool[step % len(pool)]).mean(1), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    norms.append(norm.item())  # GUILTY: item
print(f"mean norm {sum(norms[-20:]) / 20:.4f}")
