"""Loops that end before anything was tried: the message says how many steps they made, and how many it takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perfdoctor.doors.script_trial import TrialOptions, run_trial
from perfdoctor.doors.treatment_trial import TreatmentOptions, try_treatments
from perfdoctor.errors import SessionError

LOOP = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(7):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "short.py").write_text(LOOP)
    return str(tmp_path / "short.py")


def test_a_trial_of_a_short_loop_says_how_many_steps_it_made(script: str) -> None:
    with pytest.raises(SessionError, match="ended before the trial began: it made 7 steps") as raised:
        run_trial(script, (), TrialOptions(warmup=2, active=4))
    watched = re.search(r"where (\d+) or more are watched \(--warmup, --active\)", str(raised.value))
    assert watched is not None
    assert int(watched[1]) >= 2 + 4 + 4  # warm-up, bare steps, call sites


def test_treatments_of_a_short_loop_say_so_too(script: str) -> None:
    # Warm-up 2, bare 4, call sites 1 + 4, the two recordings 2 + 4 each.
    with pytest.raises(SessionError, match="ended before a treatment was tried: some 23 steps are watched"):
        try_treatments(script, (), TreatmentOptions(warmup=2, active=4))
