"""The line that built an optimizer is known where the session was there first, and nothing stays behind."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from perfdoctor.diagnose.gradient_loop import _built_at
from perfdoctor.diagnose.review import Review
from perfdoctor.doors.session import watch
from perfdoctor.record.capture import Capture, Frame, Site, read_capture
from perfdoctor.record.timeline import Timeline

HERE = Path(__file__).name


def train(optimizer: torch.optim.Optimizer, model: torch.nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_an_optimizer_built_inside_is_known_by_its_line(tmp_path: Path) -> None:
    before = torch.optim.Optimizer.__init__
    model = torch.nn.Linear(3, 1)
    with watch(warmup=1, active=2) as session:
        line = sys._getframe().f_lineno + 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(optimizer, model, 12)
    assert torch.optim.Optimizer.__init__ is before
    (site,) = session.capture.optimizers
    assert (Path(site.frame.file).name, site.frame.line) == (HERE, line)
    session.capture.save(tmp_path / "kept")
    assert read_capture(tmp_path / "kept").optimizers == (site,)


def test_an_optimizer_built_before_is_not() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(warmup=1, active=2) as session:
        train(optimizer, model, 12)
    assert session.capture.optimizers == ()


def test_a_slow_step_names_the_line_that_built_it_and_the_step_as_its_caller() -> None:
    built = Site(frame=Frame(file="train.py", line=4, function="main"))
    step = Site(frame=Frame(file="train.py", line=20, function="main"))
    one = Review(Timeline(Capture(source="session", optimizers=(built,))))
    two = Review(Timeline(Capture(source="session", optimizers=(built, step))))
    found = _built_at(one, step)
    assert found is not None
    assert (found.frame, found.caller) == (built.frame, step.frame)
    assert _built_at(two, step) == step
