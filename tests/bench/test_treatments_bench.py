"""The table of treatments: cells that measure, refuse, fail and run out of time. No time is asserted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from perfdoctor.bench.loops import LOOPS, SHOWS
from perfdoctor.bench.treatments import Cell, Plan, main, measure_all, measure_cell
from perfdoctor.treat.treatment import Loop, Numerics, Treatment


def plan(**changes: float) -> Plan:
    until = changes.get("until", time.monotonic() + 600)
    return Plan(device=torch.device("cpu"), tiny=True, rounds=2, steps=1, until=until, everything=True)


def made_up(failing: bool = False, shift: float = 0.0) -> Treatment:
    @contextmanager
    def applied(loop: Loop) -> Iterator[Loop]:
        if failing:
            raise MemoryError("all of it")
        assert loop.model is not None
        with torch.no_grad():
            for p in loop.model.parameters():
                p.add_(shift)
        yield loop

    return Treatment(name="made_up", cures=(), numerics=Numerics(), refuses=lambda _: None, applied=applied)


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_trains_on_the_cpu_and_fits_something(name: str) -> None:
    cell = measure_cell(plan(), name, LOOPS[name], made_up())
    assert (cell.why, len(cell.ratios), cell.loss_difference) == ("", 2, 0.0)
    assert cell.within_claim
    assert SHOWS[name]


def test_a_treatment_that_changes_the_numbers_is_told_on() -> None:
    cell = measure_cell(plan(), "norm_loop", LOOPS["norm_loop"], made_up(shift=0.1))
    assert not cell.within_claim
    assert "MORE THAN CLAIMED" in str(cell)


def test_a_treatment_that_fails_is_a_cell() -> None:
    cell = measure_cell(plan(), "norm_loop", LOOPS["norm_loop"], made_up(failing=True))
    assert cell.why.startswith("failed: MemoryError")


def test_refusals_and_time_are_said() -> None:
    (refused,) = measure_all(plan(), ["norm_loop"], ["tf32"])
    assert refused.why == "refused: TF32 needs a CUDA device; the loop runs on cpu"
    (late,) = measure_all(plan(until=0.0), ["norm_loop"], ["tf32"])
    assert "out of time" in late.why


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cells.json"
    options = ["--loops", "single_tensor", "--treatments", "set_to_none", "--rounds", "2", "--steps", "1", "--tiny"]
    assert main([*options, "--json", str(out)]) == 0
    (cell,) = json.loads(out.read_text())
    assert (cell["loop"], cell["treatment"], len(cell["ratios"])) == ("single_tensor", "set_to_none", 2)
    assert "single_tensor" in capsys.readouterr().out
    assert main(["--loops", "nowhere"]) == 2
    assert "unknown: nowhere" in capsys.readouterr().err


def test_a_difference_within_the_noise_of_untreated_runs_is_no_fault() -> None:
    assert Cell(loop="a", treatment="b", loss_difference=1e-6, claimed=0.0, noise=1e-6).within_claim
    assert not Cell(loop="a", treatment="b", loss_difference=1e-3, claimed=1e-4, noise=1e-6).within_claim
