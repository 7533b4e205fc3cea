"""A script that cannot be run twice in one process: that is not its failure, and what is left is said."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from perfdoctor.doors.treatment_trial import TreatedScript, TreatmentOptions, try_treatments
from perfdoctor.trial.treatment_time import TreatmentLimits

SCRIPT = """
import sys
import builtins, torch
{once}
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
number = 0
while True:
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    number += 1
    if optimizer.param_groups[0].get("fused"):
        raise torch.OutOfMemoryError("planned")
"""
_ONCE = "if hasattr(torch, 'ran_once'):\n    raise ValueError('once only')\ntorch.ran_once = True"


def _try(tmp_path: Path, once: str) -> TreatedScript:
    (tmp_path / "train.py").write_text(SCRIPT.format(once=once))
    limits = TreatmentLimits(seconds=60, each_seconds=3, rounds=6)
    options = TreatmentOptions(names=("gc_frozen", "fused_optimizer", "set_to_none"), limits=limits, warmup=1, active=3)
    return try_treatments(str(tmp_path / "train.py"), ("--epochs", "3"), options)


def test_that_it_cannot_be_run_twice_is_not_taken_for_its_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    try:
        run = _try(tmp_path, _ONCE)
    finally:
        del torch.ran_once  # type: ignore[attr-defined]
    by_name = {verdict.treatment: verdict for verdict in run.verdicts}
    assert by_name["set_to_none"].reason == (
        "not tried: the script could not be run a second time in one process (ValueError: once only)"
    )
    assert run.exit_code == 0
    command = f"perfdoctor trial --treat=set_to_none {tmp_path}/train.py --epochs 3"
    assert f"to try those left in a run of their own: {command}" in run.notes
    assert "once only" not in capsys.readouterr().err  # the page says it


def test_a_start_method_is_no_hindrance(tmp_path: Path) -> None:
    once = "import multiprocessing\nmultiprocessing.set_start_method('fork')"
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)  # as in a new process
    try:
        run = _try(tmp_path, once)
        assert multiprocessing.get_start_method(allow_none=True) is None
    finally:
        multiprocessing.set_start_method(before, force=True)
    by_name = {verdict.treatment: verdict for verdict in run.verdicts}
    assert by_name["fused_optimizer"].reason.startswith("failed: out of memory")
    assert "set_to_none" in by_name
    assert "second time" not in by_name["set_to_none"].reason
    assert "failed first" not in by_name["set_to_none"].reason
    assert run.exit_code == 0
