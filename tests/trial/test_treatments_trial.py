"""Treatments on trial in a real loop on the CPU: parity, time with a known answer, failures, everything put back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from perfdoctor.treat.treatment import Loop, Numerics, Treatment
from perfdoctor.trial.live_loop import LiveLoop
from perfdoctor.trial.treatments_trial import TreatmentLimits, TreatmentsTrial
from perfdoctor.trial.verdict import judge_parity
from perfdoctor.watch.clocks import stamp_now
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.steps import StepDetector


class _Over(BaseException):
    pass


PAUSE_S = 0.008


def _pause() -> None:
    time.sleep(PAUSE_S)


PAUSES = {"loop": _pause}


def _train(steps: int = 5000) -> None:
    """A script: a loader, a model in parts, an optimizer, and a pause that a treatment can take away."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
    done = 0
    while done < steps:
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            PAUSES["loop"]()
            done += 1


def _run(*treatments: Treatment) -> TreatmentsTrial:
    live = LiveLoop()

    def ended() -> None:
        raise _Over

    trial = TreatmentsTrial(treatments, live, limits=TreatmentLimits(seconds=30, rounds=6), ended=ended)
    steps = StepDetector(stamp_now, trial.step_ended)
    live.install()
    steps.install()
    try:
        _train()
    except _Over:
        pass
    except Exception as error:
        trial.fail(error)
    finally:
        trial.close()
        steps.remove()
        live.remove()
    return trial


@contextmanager
def _unpaused(loop: Loop) -> Iterator[Loop]:
    try:
        PAUSES["loop"] = lambda: None
        yield loop
    finally:
        PAUSES["loop"] = _pause


@contextmanager
def _wrong(loop: Loop) -> Iterator[Loop]:
    assert loop.model is not None
    patches, forward = Patches(), loop.model.forward
    try:
        patches.replace(loop.model, "forward", lambda x: forward(x) * 1.01)
        yield loop
    finally:
        patches.undo()


@contextmanager
def _full(loop: Loop) -> Iterator[Loop]:
    assert loop.model is not None

    def forward(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("planned")

    patches = Patches()
    try:
        patches.replace(loop.model, "forward", forward)
        yield loop
    finally:
        patches.undo()


@contextmanager
def _broken(loop: Loop) -> Iterator[Loop]:
    raise RuntimeError("cannot be applied")
    yield loop


def _treatment(name: str, applied: object, refusal: str | None = None, rtol: float = 0.0) -> Treatment:
    return Treatment(
        name=name, cures=(), numerics=Numerics(rtol=rtol), refuses=lambda _: refusal, applied=applied,  # type: ignore[arg-type]
        lines=(f"line of {name}",),
    )  # fmt: skip


def test_a_pause_taken_away_is_faster_with_equal_losses() -> None:
    trial = _run(_treatment("unpaused", _unpaused))
    (verdict,) = trial.verdicts
    assert verdict.accepted, verdict.reason
    assert verdict.parity.kept
    assert verdict.parity.difference == 0
    assert verdict.saving is not None
    assert verdict.saving.mid_ns > 0.9 * PAUSE_S * 1e9
    assert verdict.speed_up is not None
    assert 1 < verdict.speed_up.low <= verdict.speed_up.mid <= verdict.speed_up.high
    assert verdict.lines == ("line of unpaused",)
    assert PAUSES["loop"] is _pause


def test_other_numbers_refusals_and_failures_are_verdicts() -> None:
    trial = _run(
        _treatment("wrong", _wrong),
        _treatment("unfit", _unpaused, refusal="no such device"),
        _treatment("broken", _broken),
    )
    wrong, unfit, broken = trial.verdicts
    assert not any(verdict.accepted for verdict in trial.verdicts)
    assert wrong.parity.kept is False
    assert "not timed" in wrong.reason
    assert unfit.reason == "does not fit: no such device"
    assert broken.reason == "failed: RuntimeError: cannot be applied"


def test_an_error_in_the_script_is_the_active_treatments() -> None:
    trial = _run(_treatment("full", _full))
    (verdict,) = trial.verdicts
    assert verdict.reason == "failed: out of memory: OutOfMemoryError: planned"
    assert trial.active == ""


def test_the_live_loop_sees_the_outermost_module_the_optimizer_and_the_loader() -> None:
    seen: list[Loop] = []

    def look(loop: Loop) -> str:
        seen.append(loop)
        return "only looking"

    before = (torch.Tensor.backward, DataLoader.__iter__)
    treatment = Treatment(name="look", cures=(), numerics=Numerics(), refuses=look, applied=_unpaused)
    _run(treatment)
    (loop,) = seen
    assert isinstance(loop.model, torch.nn.Sequential)
    assert isinstance(loop.optimizers[0], torch.optim.SGD)
    assert isinstance(loop.loader, DataLoader)
    assert (torch.Tensor.backward, DataLoader.__iter__) == before


@pytest.mark.parametrize(
    ("base", "again", "treated", "rtol", "kept"),
    [
        ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], 0.0, True),
        ([1.0, 2.0], [1.0, 2.0], [1.0, 2.001], 0.0, False),
        ([1.0, 2.0], [1.0, 2.0], [1.0, 2.001], 1e-3, True),
        ([1.0, 2.0], [1.0, 2.001], [1.0, 2.0015], 0.0, True),  # within twice what the loop differs from itself by
        ([1.0], [1.0], [math.nan], 1.0, False),
        ([math.nan], [math.nan], [math.nan], 0.0, True),
        ([1.0], [1.0], [1.0, 2.0], 0.0, None),
        ([], [], [], 0.0, None),
    ],
)
def test_parity(base: list[float], again: list[float], treated: list[float], rtol: float, kept: bool | None) -> None:
    assert judge_parity(base, again, treated, rtol=rtol, atol=0.0).kept is kept
