"""A suspect whose line does not run in the trial is said to be that, and nothing else; one that runs late is tried."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import suspect_trials
import torch
from suspect_trials import run, trial_of
from torch import nn
from torch.utils.data import DataLoader

from perfdoctor.diagnose.finding import Finding
from perfdoctor.trial.call_hooks import Place
from perfdoctor.trial.outcome import TrialOutcome
from perfdoctor.trial.reached_lines import ReachedLines
from perfdoctor.trial.runner import MOST_OBSERVED_STEPS, OBSERVED_STEPS

ROOT = Path(__file__).parents[2]
finding = partial(suspect_trials.finding, __file__)


def tried(
    device: Any, step: Callable[[int], None], optimizer: Any, *findings: Finding, steps: int = 600
) -> TrialOutcome:
    return run(device, trial_of(findings, optimizer, steps=steps), step, 10_000)


class Loop:
    """A step, and a validation that reads, copies, masks, averages and waits, every so many steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).to("cuda")
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.average = [p.detach().clone() for p in self.model.parameters()]

    def validate(self) -> None:
        with torch.no_grad():
            x = torch.ones(2, 4).to("cuda")  # copied
            loss = self.model(x).square().mean()
            loss.item()  # read
            x[x > 0].sum()  # masked
            for mine, p in zip(self.average, self.model.parameters(), strict=True):
                mine.mul_(0.9).add_(p, alpha=0.1)  # averaged
            sum(p.grad.norm().item() for p in self.model.parameters())  # type: ignore[union-attr]  # reduced
            torch.cuda.synchronize()  # waited

    def step(self, number: int) -> None:
        self.model(torch.ones(2, 4, device="cuda")).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        if (number + 1) % self.every == 0:
            self.validate()


KINDS = {
    "copied": ("pageable-copy", "h2d_pageable"),
    "read": ("host-sync", "item"),
    "masked": ("host-sync", "boolean_mask"),
    "averaged": ("gradient-loop", "ema_loop"),
    "reduced": ("gradient-loop", "slow_grad_norm_loop"),
    "waited": ("host-sync", "cuda_synchronize"),
}


@pytest.mark.parametrize("marker", KINDS)
def test_a_line_that_does_not_run_is_said_to_be_that(device: Any, marker: str) -> None:
    loop = Loop(every=10**9)
    (refusal,) = tried(device, loop.step, loop.optimizer, finding(marker, *KINDS[marker])).refused
    assert refusal.why == f"its line did not run in the {MOST_OBSERVED_STEPS} steps that the trial looked at"
    assert sys.gettrace() is None


@pytest.mark.parametrize("marker", ["read", "waited"])
def test_a_line_that_runs_now_and_then_is_tried(device: Any, marker: str) -> None:
    loop = Loop(every=10)
    outcome = tried(device, loop.step, loop.optimizer, finding(marker, *KINDS[marker]))
    assert not outcome.refused
    assert outcome.arms


def test_where_all_lines_have_run_nothing_more_is_looked_at(device: Any) -> None:
    loop = Loop(every=1)
    seen: list[int] = []

    def step(number: int) -> None:
        loop.step(number)
        if sys.gettrace() is not None:
            seen.append(number)

    outcome = tried(device, step, loop.optimizer, finding("read", *KINDS["read"]), steps=60)
    assert seen == []  # traced until the line ran
    assert outcome.arms
    assert OBSERVED_STEPS < MOST_OBSERVED_STEPS


def test_a_line_that_runs_and_shows_no_call_keeps_its_reason(device: Any) -> None:
    loop = Loop(every=1)

    def step(number: int) -> None:
        loop.step(number)
        sum(range(3))  # nothing

    (refusal,) = tried(device, step, loop.optimizer, finding("nothing", "host-sync", "item")).refused
    assert "no call that Python sees reads a tensor here" in refusal.why


def test_a_line_that_is_no_call_but_a_function_is_not_judged(device: Any) -> None:
    loop = Loop(every=10**9)
    (refusal,) = tried(device, loop.step, loop.optimizer, finding("read", *KINDS["read"], exact=False)).refused
    assert "did not run" not in refusal.why


def test_a_debugger_stays(device: Any) -> None:
    loop = Loop(every=10**9)

    def debugger(*_: Any) -> None:
        return None

    sys.settrace(debugger)
    try:
        (refusal,) = tried(device, loop.step, loop.optimizer, finding("read", *KINDS["read"])).refused
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(None)
    assert "did not run" not in refusal.why


class Traced(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(sys.gettrace() is not None)


def test_workers_that_are_forked_meanwhile_are_not_traced() -> None:
    lines = ReachedLines([Place(file="nowhere.py", first=1, last=1)])
    lines.install()
    try:
        found = [int(each) for each in DataLoader(Traced(), num_workers=1, multiprocessing_context="fork")]
    finally:
        lines.remove()
        lines.remove()
    assert found == [0, 0, 0, 0]
    assert sys.gettrace() is None


def test_equal_code_in_two_files(tmp_path: Path) -> None:
    functions: list[Any] = []
    for name in ("copy.py", "train.py"):
        names: dict[str, Any] = {}
        exec(compile("def f():\n    return 1\n", str(tmp_path / name), "exec"), names)
        functions.append(names["f"])
    place = Place(file=str(tmp_path / "train.py"), first=2, last=2)
    lines = ReachedLines([place])
    lines.install()
    try:
        functions[0]()
        missing = lines.missing(place)
        functions[1]()
    finally:
        lines.remove()
    assert missing
    assert not lines.missing(place)


def test_who_puts_our_tracer_back_later_does_not_trace() -> None:
    lines = ReachedLines([Place(file="nowhere.py", first=1, last=1)])
    lines.install()
    before = sys.gettrace()
    sys.settrace(None)  # an exact measurement of the script's own, say
    lines.remove()
    sys.settrace(before)
    len(str(Path("x")))
    found = sys.gettrace()
    sys.settrace(None)
    assert before is not None
    assert found is None


def test_a_line_that_another_thread_runs_is_not_said_to_be_missed(device: Any) -> None:
    """As autograd's on a GPU, in which hooks of a backward pass run."""
    loop = Loop(every=10**9)

    x = torch.arange(64.0, device="cuda")

    def log() -> None:
        x[x > 64 * random.random()].sum()  # masked by a thread

    def step(number: int) -> None:
        loop.step(number)
        thread = threading.Thread(target=log)
        thread.start()
        thread.join()

    (refusal,) = tried(device, step, loop.optimizer, finding("masked by a thread", *KINDS["masked"])).refused
    assert "gives another size each time" in refusal.why


EPOCHS = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(8, 2).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(LENGTH, 8)), batch_size=4)
def validate():
    total = 0.0
    with torch.no_grad():
        for (x,) in DataLoader(TensorDataset(torch.randn(80, 8)), batch_size=4):
            total += model(x.cuda()).square().mean().item()
    return total
validate()
for epoch in range(100000):
    for step, (x,) in enumerate(loader):
        loss = model(x.cuda()).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        loss.item()
        if step in (6, 9, 12, 15, 18):
            validate()
"""


def test_a_validation_that_the_trial_does_not_come_to(tmp_path: Path) -> None:
    """It runs while the loop is watched, and not again before the next epoch."""
    (tmp_path / "train.py").write_text(EPOCHS.replace("LENGTH", "100000"))
    words = ["trial", "--device", "emulated", "--seconds", "4", "--format", "json", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "perfdoctor", *words],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    refused = json.loads(done.stdout)["trial"]["refused"]
    late = [row["why"] for row in refused if row["site"] and row["site"]["line"] == 11]
    assert late, (refused, done.stdout)
    assert all("did not run in the" in why for why in late)
