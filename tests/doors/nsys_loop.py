"""A loop on the CPU for nsys: `loop.py N CODE` exits with CODE in step N, and runs to its end for N = -1."""

LOOP = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(4000, 64)), batch_size=16)
for number, (batch,) in enumerate(loader):
    print("step", number, flush=True)
    if number == int(sys.argv[1]):
        sys.exit(int(sys.argv[2]))
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
