"""A loop with Lightning Fabric, watched through the context manager.

python examples/fabric_loop.py                          # without a GPU on an emulated one
"""

import argparse
from contextlib import nullcontext

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import perfdoctor


def train(steps, warmup, active):
    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    fabric.seed_everything(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = torch.randn(4096, 64)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), 64, shuffle=True))
    total = 0.0
    with perfdoctor.watch(warmup=warmup, active=active) as session:
        for _ in range(-(-steps // len(loader))):
            for inputs, targets in session.batches(loader):
                loss = nn.functional.mse_loss(model(inputs), targets)
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.item()
    print(session.diagnosis())
    return session


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--active", type=int, default=10)
    options = parser.parse_args()
    with nullcontext() if torch.cuda.is_available() else perfdoctor.emulate_cuda():
        return train(options.steps, options.warmup, options.active)


if __name__ == "__main__":
    main()
