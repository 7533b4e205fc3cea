"""A vision transformer trained with gradient accumulation: three micro-batches an update, the loss logged for each."""

import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

STEPS = int(os.environ.get("STEPS", "60"))
MICRO_BATCHES, BATCH, WIDTH, DEPTH, PATCHES = 3, 640, 512, 6, 64
device = torch.device("cuda")
torch.manual_seed(3)
torch.backends.cuda.matmul.allow_tf32 = True


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3 * 4 * 4, WIDTH)
        self.position = nn.Parameter(torch.zeros(1, PATCHES, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, patches):
        return self.head(self.encoder(self.embed(patches) + self.position).mean(1))


noise = np.random.default_rng(3)
images = torch.randn(BATCH, PATCHES, 48).to(device)
labels = torch.randint(0, 100, (BATCH,)).to(device)


def mixing_weights():
    """What mixup draws for a micro-batch, on the host."""
    weights = noise.beta(0.4, 0.4, size=20_000)
    return torch.from_numpy(weights[:BATCH]).float().pin_memory()


model = VisionTransformer().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
seen = torch.zeros((), device=device)
for _update in range(STEPS):
    for _ in range(MICRO_BATCHES):
        weight = mixing_weights().to(device, non_blocking=True)[:, None, None]
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(images * weight + images.flip(0) * (1 - weight))
            loss = F.cross_entropy(logits, labels) / MICRO_BATCHES
        loss.backward()
        seen += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print(f"mean loss {float(seen) / STEPS:.4f}")
