"""The loop of the tests of a session."""

import torch
from torch.utils.data import DataLoader, TensorDataset


class Loop:
    """A small model with dropout, an optimizer, and shuffled batches."""

    def __init__(self, rows=64, workers=0):
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(rows, 4), torch.randn(rows, 1))
        context = "fork" if workers else None
        self.loader = DataLoader(data, 4, shuffle=True, num_workers=workers, multiprocessing_context=context)

    def step(self, batch, accumulate=1):
        loss = (self.model(batch[0]) - batch[1]).square().mean() / accumulate
        loss.backward()
        return loss

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, batches):
        losses = []
        for batch in batches:
            losses.append(self.step(batch).detach())
            self.update()
        return [float(loss) for loss in losses]
