"""Trials of lines of a test file on the emulated device, with a clock that counts crossings to the host.

The clock says `STEP` for a step and `STALL` for each call of it that stalls the host: what a suspect gives back is
known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from perfdoctor.diagnose.finding import Binding, Diagnosis, Finding, Severity, StepTime
from perfdoctor.record.capture import Frame, Site
from perfdoctor.trial.clock import BlockClock
from perfdoctor.trial.loader_replay import LoaderReplay
from perfdoctor.trial.outcome import TrialOutcome
from perfdoctor.trial.runner import Limits, Trial
from perfdoctor.trial.suspects import Surroundings, choose_suspects

STEP, STALL = 1000, 100


def line_of(file: str, marker: str) -> int:
    """The line of `file` that ends with the comment `# marker`."""
    lines = Path(file).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))


def finding(
    file: str, marker: str, code: str, kind: str, *, title: str = "", exact: bool = True, **fields: Any
) -> Finding:
    """A finding at the line of `file` that is marked so; about the whole step where `marker` is empty."""
    site = None
    if marker:
        frame = Frame(file=file, line=line_of(file, marker), function="", owner="user")
        site = Site(frame=frame, text=marker, exact=exact)
    return Finding(code=code, severity=Severity.COST, title=title or kind, kind=kind, site=site, count=1.0, **fields)


def diagnosis(findings: Sequence[Finding]) -> Diagnosis:
    step = StepTime(median_ns=25_000_000, low_ns=0, high_ns=0, num_steps=10, basis="test")  # blocks of eight or ten
    return Diagnosis(
        source="test", step=step, accounting=None, binding=Binding.UNKNOWN, findings=tuple(findings), leave_alone=()
    )


def trial_of(
    findings: Sequence[Finding],
    *optimizers: Any,
    replay: LoaderReplay | None = None,
    steps: int = 1000,
    most: int = 10,
) -> Trial:
    """The trial of these, of at most `most` suspects and `steps` steps."""
    found, replay = diagnosis(findings), replay or LoaderReplay(lambda: None)
    suspects = choose_suspects(found, Surroundings(optimizers=optimizers, replay=replay))
    limits, clock = Limits(steps=steps, seconds=600), BlockClock(lambda a, b: b - a)
    return Trial(found, suspects, replay, limits=limits, most=most, clock=clock)


def run(device: Any, trial: Trial, step: Callable[[int], None], most_steps: int = 100_000) -> TrialOutcome:
    """Run `step` until the trial is over, with the clock of crossings."""
    trial.start()
    now = 0
    try:
        for number in range(most_steps):
            before = len(device.log.hits)
            step(number)
            now += STEP + STALL * (len(device.log.hits) - before)
            trial.step_ended(now)
            if trial.over:
                break
    finally:
        trial.finish()
    return trial.outcome()


class Loop:
    """A small model on the device, and what a test puts into its step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to("cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self.pool = [torch.randn(4, 8) for _ in range(4)]
        self.steps = 0
        self.seen: list[Any] = []

    def train(self, x: torch.Tensor, extra: Callable[[torch.Tensor], Any]) -> None:
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.seen.append(extra(loss))
        self.optimizer.step()
        self.steps += 1


def tried(
    device: Any,
    loop: Loop,
    step: Callable[[int], None],
    *findings: Finding,
    most: int = 100_000,
    replay: LoaderReplay | None = None,
    steps: int = 1000,
    room: int = 10,
) -> TrialOutcome:
    """The trial of these lines of `step`."""
    trial = trial_of(findings, loop.optimizer, replay=replay, steps=steps, most=room)
    return run(device, trial, step, most)


def saving(outcome: TrialOutcome, mode: str) -> tuple[int, int, int]:
    arm = next(arm for arm in outcome.arms if arm.mode == mode)
    return arm.saving.median_ns, arm.saving.low_ns, arm.saving.high_ns
