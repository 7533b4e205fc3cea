"""Which lines belong to the step: every second step does, wherever the watched window begins; every tenth does not."""

from __future__ import annotations

import pytest
import torch

import perfdoctor
from perfdoctor.diagnose.hit_counts import hit_counts


@pytest.mark.parametrize(("every", "regular"), [(1, True), (2, True), (5, False)])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("active", [11, 12])
def test_a_line_of_every_second_step_is_of_the_step(every: int, regular: bool, first: int, active: int) -> None:
    with perfdoctor.emulate_cuda():
        model = torch.nn.Linear(2, 2).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with perfdoctor.watch(warmup=2, active=active) as session:
            for step in range(3 * active + 30):
                loss = model(torch.ones(1, 2, device="cuda")).sum()
                loss.backward()
                optimizer.step()
                if step % every == first % every:
                    loss.item()
    (count,) = hit_counts(session.capture)
    assert count.regular is regular


@pytest.mark.parametrize("steps", [9, 10, 12, 14])
def test_a_loop_that_ends_while_it_is_watched_counts_its_whole_steps(steps: int) -> None:
    """2 steps of warm-up and 4 bare, then hooks; what stands behind the loop is no line of the step."""
    with perfdoctor.emulate_cuda():
        model = torch.nn.Linear(2, 2).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with perfdoctor.watch(warmup=2, active=4) as session:
            for _ in range(steps):
                loss = model(torch.ones(1, 2, device="cuda")).sum()
                loss.backward()
                loss.item()
                loss.item()
                optimizer.step()
            for _ in range(3):
                loss.tolist()
    assert [(count.kind, count.per_step) for count in hit_counts(session.capture)] == [("item", 1.0), ("item", 1.0)]
