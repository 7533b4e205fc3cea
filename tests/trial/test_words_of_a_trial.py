"""What a trial says of a mode is said in a user's words."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfdoctor.diagnose.finding import Binding, Diagnosis, Finding, Saving, Severity
from perfdoctor.record.capture import Note
from perfdoctor.report.trial import render_trial
from perfdoctor.trial.arms import Arm, name_of
from perfdoctor.trial.neutral_copy import GONE as COPY_GONE
from perfdoctor.trial.neutral_copy import MADE_ONCE, PINNED
from perfdoctor.trial.neutral_read import GONE, SPARSE
from perfdoctor.trial.neutraliser import Mode
from perfdoctor.trial.outcome import ArmResult, TrialOutcome

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mode", [GONE, SPARSE, COPY_GONE, MADE_ONCE, PINNED])
def test_an_arm_is_named_by_what_is_done_not_by_the_name_of_its_mode(mode: Mode) -> None:
    finding = Finding(code="host-sync", severity=Severity.COST, title="reads a device value")
    assert name_of(Arm(finding=finding, mode=mode, switches=())) == f"host-sync ({mode.text})"


def _outcome(**changes: Any) -> TrialOutcome:
    diagnosis = Diagnosis(
        source="train.py", step=None, accounting=None, binding=Binding.UNKNOWN, findings=(), leave_alone=()
    )
    return replace(TrialOutcome(diagnosis=diagnosis, base_ns=10_000_000, counted=4, num_steps=100), **changes)


def _arm(finding: Finding | None, saving: tuple[int, int, int], num_pairs: int, mode: str = "gone") -> ArmResult:
    low, mid, high = saving
    figures = Saving(median_ns=mid, low_ns=low, high_ns=high, basis="")
    return ArmResult(finding=finding, mode=mode, text="x", prediction=True, saving=figures, num_pairs=num_pairs)


FINDING = Finding(code="host-sync", severity=Severity.COST, title="reads a device value")


def test_too_few_pairs_are_not_called_no_difference() -> None:
    text = render_trial(_outcome(arms=(_arm(FINDING, (-9_000_000, 4_000_000, 17_000_000), 2),)))
    assert "not decided: only 2 pairs of blocks" in text
    assert "no difference" not in text


@pytest.mark.parametrize(("complete", "advice"), [(True, "Give it more --seconds"), (False, "Let it run longer")])
def test_what_to_do_where_nothing_was_decided(complete: bool, advice: str) -> None:
    arms = (_arm(FINDING, (-9_000_000, 4_000_000, 17_000_000), 2),)
    assert advice in render_trial(_outcome(arms=arms, complete=complete))


def test_a_gain_of_all_together_is_not_nothing() -> None:
    arms = (_arm(FINDING, (-100_000, 100_000, 200_000), 40), _arm(None, (200_000, 300_000, 400_000), 40, "all"))
    text = render_trial(_outcome(arms=arms))
    assert "all together: gives back 0.30 ms (0.20 to 0.40 ms), 3 % of the step" in " ".join(text.split())
    assert "Nothing" not in text


def test_a_loop_in_which_nothing_was_found_says_so() -> None:
    text = render_trial(_outcome(base_ns=0, num_steps=8))
    assert "Nothing to try" in text
    assert "0 rounds" not in text


def test_what_the_trial_measured_is_not_called_withheld() -> None:
    """On the CPU nothing is replayed, but the trial has the figures."""
    reason = "no device recording: what comes back needs a GPU"
    waits = replace(FINDING, code="data-wait", withheld=reason)
    measured = [
        replace(waits, measured_saving=Saving(median_ns=4_000_000, low_ns=3_000_000, high_ns=5_000_000, basis="")),
        replace(FINDING, withheld=reason, measured_saving=Saving(median_ns=0, low_ns=-9, high_ns=9, basis="")),
    ]
    diagnosis = replace(_outcome().diagnosis, findings=tuple(measured))
    text = " ".join(render_trial(_outcome(diagnosis=diagnosis)).split())
    assert "needs a GPU" not in text
    assert "comes back at most 4.0 ms a step (3.0 to 5.0 ms), in the trial" in text
    assert "comes back nothing for sure, in the trial" in text
    assert "the page says where the loop waits, the trial what that costs" in text
    untried = replace(diagnosis, findings=(*measured, waits))
    assert f"comes back withheld: {reason}" in " ".join(render_trial(_outcome(diagnosis=untried)).split())


@pytest.mark.parametrize("code", ["no-gpu", "emulated-device"])
def test_a_loop_on_the_cpu_is_told_of_the_emulated_device(code: str) -> None:
    """Where nothing is found, and where something is: what waits for a GPU is not seen there."""
    diagnosis = replace(_outcome().diagnosis, notes=(Note(code=code, text="x"),))
    command = "perfdoctor trial --device emulated train.py --epochs 2"
    for findings in ((), (FINDING,)):
        page = render_trial(_outcome(diagnosis=replace(diagnosis, findings=findings)), emulated=command)
        assert page.endswith(f"   {command}\n") == (code == "no-gpu")
    assert "emulated" not in render_trial(_outcome(diagnosis=diagnosis))


def test_the_command_for_the_emulated_device_holds_what_was_typed(tmp_path: Path) -> None:
    source = "import torch\nw = torch.zeros(4, requires_grad=True)\nopt = torch.optim.SGD([w], 0.1)\n"
    (tmp_path / "train.py").write_text(f"{source}while True:\n    w.sum().backward()\n    opt.step()\n")
    words = ["--warmup", "3", "--seconds", "2", "train.py", "--name", "two words"]
    done = subprocess.run(
        [sys.executable, "-m", "perfdoctor", "trial", *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    command = "perfdoctor trial --device emulated --warmup 3 --seconds 2 train.py --name 'two words'"
    assert done.stdout.splitlines()[-1].strip() == command
