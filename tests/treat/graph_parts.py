"""What the tests of graph_obstacles share: a model with its optimizer and batch, and lines by their text."""

import inspect

import torch
from torch import nn


def parts(device, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2)).to(device)
    opt = optimizer(model.parameters(), lr=0.1, **options)
    return model, opt, torch.ones(6, 4, device=device), torch.zeros(6, 2, device=device)


def line_of(function, text):
    """The line of `function` that holds `text`."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def found_in(file, result, code=None):
    """(code, line) of the rows in `file`."""
    return [
        (row.code, row.site.frame.line) for row in result if row.site.frame.file == file and code in (None, row.code)
    ]


def lines_changing(function):
    """The lines of `function` that end with the comment `# changes`."""
    lines, first = inspect.getsourcelines(function)
    return [first + number for number, line in enumerate(lines) if line.rstrip().endswith("# changes")]


class Parts:
    """A model, its optimizer and a batch."""

    def __init__(self, lr=1e-3):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, capturable=True)
        self.x = torch.ones(6, 4, device="cuda")

    def trained(self, x, factor=1.0):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean() * factor
        loss.backward()
        self.optimizer.step()
        return loss
