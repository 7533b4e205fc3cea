"""A loop with Accelerate, gradients accumulated over two micro-batches, watched through the context manager.

python examples/accelerate_loop.py                      # without a GPU on the CPU
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import perfdoctor


def train(steps, warmup, active):
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    data = torch.randn(4096, 64)
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), 32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
    total = 0.0
    with perfdoctor.watch(warmup=warmup, active=active) as session:
        for _ in range(-(-2 * steps // len(loader))):
            for inputs, targets in session.batches(loader):
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
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
    return train(options.steps, options.warmup, options.active)


if __name__ == "__main__":
    main()
