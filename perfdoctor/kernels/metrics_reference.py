"""What the metric kernels compute, in torch: for CPU tensors, and what the kernels are held to.

    sum += w x    weight += w    mean = sum / weight    ema = d ema + (1 - d) x    min, max: a NaN stays

All in float64. No operation here makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SUM, WEIGHT, LAST, MIN, MAX, EMA, EMA_WEIGHT, NUM_UPDATES = range(8)
COLUMNS = 8
ROWS = 64
"""of the state: one a metric, and the last for the decay of the moving average"""
DECAY_ROW = ROWS - 1
LANES = 16
"""metrics that one launch takes"""
RECORD = 8
"""int64 of a record: bad checks, check, index (-1: the loss), its count, bad tensors, bad values, excused checks, 0"""
# A number travels to the kernel as its bits, and Triton types an int by its size. Flipped with a NaN that Python never
# makes, no number (0.0 least of all) is small enough for 32 bits.
FLIP = 0x7FF4000000000001


def new_state(device: torch.device, decay: float) -> Tensor:
    """float64 [ROWS, COLUMNS] with nothing added yet."""
    state = torch.zeros((ROWS, COLUMNS), dtype=torch.float64, device=device)
    clear(state)
    state[DECAY_ROW, 0].fill_(decay)
    return state


def clear(state: Tensor) -> None:
    """Forgets what was added; how often each metric was updated stays."""
    state[:DECAY_ROW, :NUM_UPDATES].zero_()
    state[:DECAY_ROW, MIN].fill_(float("inf"))
    state[:DECAY_ROW, MAX].fill_(float("-inf"))


def row_of(value: float, before: Sequence[float] | None) -> list[float]:
    """A row that this one value makes up; `before` is the row that it stands in for."""
    return [value, 1.0, value, value, value, value, 1.0, before[NUM_UPDATES] if before else 1.0]


def accumulate(state: Tensor, snapshot: Tensor, rows: Sequence[int], values: Sequence[Tensor | float],
               weight: Tensor | float) -> None:  # fmt: skip
    """Adds each value, a tensor of one element or a number, to its row; then copies state to snapshot."""
    x = torch.stack([_wide(value, state.device) for value in values])
    by = _wide(weight, state.device)
    old = torch.stack([state[row] for row in rows])
    decay = state[DECAY_ROW, 0]
    columns = (
        old[:, SUM] + by * x,
        old[:, WEIGHT] + by,
        x,
        torch.minimum(old[:, MIN], x),
        torch.maximum(old[:, MAX], x),
        old[:, EMA] * decay + x * (1.0 - decay),
        old[:, EMA_WEIGHT] * decay + (1.0 - decay),
        old[:, NUM_UPDATES] + 1.0,
    )
    new = torch.stack(columns, dim=1)
    for index, row in enumerate(rows):
        state[row].copy_(new[index])
    snapshot.copy_(state)


def _wide(value: Tensor | float, device: torch.device) -> Tensor:
    """float64 []."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)  # torch.tensor(value) would wait for the device


def note_nonfinite(record: Tensor, found: Tensor, loss: Tensor | None, excuse: Tensor | None, is_scale: bool,
                   counts: Tensor, check: int) -> None:  # fmt: skip
    """Notes in record int64 [RECORD] the first check since it was cleared that saw a non-finite value.

    `counts` int64 [n]: non-finite values of each gradient. `excuse` []: gradients do not count where it is above zero
    (an optimizer's found_inf) or, with `is_scale`, at least one (a GradScaler's scale). found [] gets 1.0 once the
    record holds something.
    """
    zero = torch.zeros((), dtype=torch.int64, device=record.device)
    num_bad, index, count, num_values = zero, zero, zero, zero
    if counts.numel():
        hits = (counts > 0).to(torch.int64)
        num_bad, num_values = hits.sum(), counts.sum()
        place = hits.argmax().reshape(1)
        index, count = place.reshape(()), counts.index_select(0, place).reshape(())
    excused = torch.zeros((), dtype=torch.bool, device=record.device)
    if excuse is not None:
        excused = (num_bad > 0) & ((excuse.reshape(()) >= 1) if is_scale else (excuse.reshape(()) > 0))
    bad = (num_bad > 0) & ~excused
    if loss is not None:
        bad_loss = ~torch.isfinite(loss.detach().reshape(()))
        index = torch.where(bad_loss, zero - 1, index)
        count = torch.where(bad_loss, zero + 1, count)
        bad = bad | bad_loss
    checks = torch.full((), check, dtype=torch.int64, device=record.device)
    new = torch.stack((record[0] + bad, checks, index, count, num_bad, num_values, record[6] + excused, zero))
    old = torch.cat((new[:1], record[1:6], new[6:]))
    record.copy_(torch.where(bad & (record[0] == 0), new, old))
    found.copy_(record[0] > 0)


def take(record: Tensor, snapshot: Tensor, found: Tensor) -> None:
    """Copies record to snapshot and clears it, and found."""
    snapshot.copy_(record)
    record.zero_()
    found.zero_()
