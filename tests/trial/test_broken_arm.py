"""A script that dies of what is on trial: that is named with the script's error, and the others are judged."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import perfdoctor
from perfdoctor.diagnose.finding import Binding, Diagnosis, Finding, Saving, Severity
from perfdoctor.report.json import schema
from perfdoctor.trial.arms import Arm
from perfdoctor.trial.broken_arm import broken_by, judged_without, others_undecided
from perfdoctor.trial.neutraliser import Mode, Neutraliser
from perfdoctor.trial.outcome import ArmResult, TrialOutcome

ROOT = Path(__file__).parents[2]
# Line 10 reads labels that line 11 checks; line 12 reads a loss that nothing depends on.
CHECKED = """\
import sys, torch
model = torch.nn.Linear(32, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
total = 0.0
for step in range(100000):
    x = torch.randn(8, 32, device="cuda")
    labels = torch.full((8,), float(step), device="cuda")
    loss = model(x).square().mean() + labels.mean() * 0
    loss.backward()
    rows = labels.cpu()
    torch.testing.assert_close(rows.sum().item(), 8.0 * step, rtol=0.0, atol=0.0)
    total += loss.item() * OTHER
    optimizer.step()
    optimizer.zero_grad()
    if step == int(sys.argv[1]):
        raise KeyError("of its own")
"""


def run_trial(folder: Path, source: str, stop: int, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(source)
    words = [sys.executable, "-m", "perfdoctor", "trial", "--device", "emulated", *options, "train.py", str(stop)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


def joined(text: str) -> str:
    return " ".join(text.split())


def test_what_the_script_died_of_is_named_and_the_other_suspect_is_judged(tmp_path: Path) -> None:
    done = run_trial(tmp_path, CHECKED.replace("OTHER", "1"), -1, "--seconds", "4", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert "the script failed with train.py:10 host-sync (answered with the value of the step before)" in done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(document, schema())
    refused = {row["site"]["line"]: row["why"] for row in document["trial"]["refused"] if row["site"]}
    assert "(answered with the value of the step before): AssertionError: Scalars are not equal!" in refused[10]
    judged = [arm for arm in document["trial"]["arms"] if arm["site"] and arm["site"]["line"] == 12]
    assert judged
    assert judged[0]["num_pairs"] >= 6
    assert document["trial"]["complete"]
    assert document["trial"]["failure"] is None


def test_with_nothing_else_to_judge_the_page_says_what_was_on_and_not_to_run_longer(tmp_path: Path) -> None:
    source = CHECKED.replace("    total += loss.item() * OTHER\n", "").replace("rows.sum().item()", "float(rows.sum())")
    done = run_trial(tmp_path, source, -1, "--seconds", "4", "--suspects", "1")
    assert done.returncode == 1
    page = joined(done.stdout)
    assert "train.py:10 host-sync" in page
    assert "the script failed with this on (answered with the value of the step before): AssertionError" in page
    assert "run longer" not in page
    assert "ended with exit code 1, with train.py:10 host-sync (answered with the value" in done.stderr.splitlines()[-1]


def test_what_only_fails_together_is_judged_alone(tmp_path: Path) -> None:
    """Two reads of one value: either may be a step late, not both."""
    source = CHECKED.replace("rows = labels.cpu()", "a = labels.max().item()")
    check = "torch.testing.assert_close(torch.tensor((step - a) * (step - b)), torch.tensor(0.0))"
    source = source.replace(
        "torch.testing.assert_close(rows.sum().item(), 8.0 * step, rtol=0.0, atol=0.0)", "b = labels.min().item()"
    ).replace("total += loss.item() * OTHER", check)
    done = run_trial(tmp_path, source, -1, "--seconds", "5", "--format", "json")
    assert done.returncode == 0, done.stderr
    trial = json.loads(done.stdout)["trial"]
    assert [note for note in trial["notes"] if note.startswith("all suspects together: given up")], trial["notes"]
    assert {arm["site"]["line"] for arm in trial["arms"] if arm["prediction"] and arm["num_pairs"] >= 6} == {10, 11}
    assert all(arm["code"] for arm in trial["arms"])
    assert trial["refused"] == []


def test_an_error_of_its_own_is_no_suspect_s(tmp_path: Path) -> None:
    """It comes while the trial still looks at the loop, with nothing taken out."""
    source = CHECKED.replace("OTHER", "1")
    done = run_trial(tmp_path, source, 5 + 3 * 4 + 6, "--warmup", "5", "--active", "4", "--seconds", "4")
    assert done.returncode == 1
    page = joined(done.stdout)
    assert re.search(r"the script failed \(KeyError: 'of its own'\); the (loop|trial) ended after", page), page
    assert page.endswith("Nothing was decided: the script failed (KeyError: 'of its own').")
    assert "run longer" not in page
    assert "on trial" not in done.stderr


FINDINGS = [Finding(code="host-sync", kind=kind, severity=Severity.COST, title="reads") for kind in ("item", "cpu")]
SAVING = Saving(median_ns=100, low_ns=50, high_ns=150, basis="")


def _arms() -> list[Arm]:
    """A prediction and a bound of the first, a prediction of the second, and both predictions together."""
    both = [Neutraliser(), Neutraliser()]
    modes = [Mode(name="gone", text="gone"), Mode(name="every", text="now and then", prediction=False)]
    first = [Arm(finding=FINDINGS[0], mode=mode, switches=((both[0], mode.name),)) for mode in modes]
    second = Arm(finding=FINDINGS[1], mode=modes[0], switches=((both[1], "gone"),))
    together = Arm(
        finding=None, mode=Mode(name="all", text="all together"), switches=first[0].switches + second.switches
    )
    return [first[0], first[1], second, together]


def _outcome(num_pairs: int) -> TrialOutcome:
    diagnosis = Diagnosis(
        source="train.py", step=None, accounting=None, binding=Binding.UNKNOWN, findings=(), leave_alone=()
    )
    rows = [
        ArmResult(
            finding=arm.finding, mode=arm.mode.name, text=arm.mode.text, prediction=arm.mode.prediction,
            saving=SAVING, num_pairs=num_pairs,
        )
        for arm in _arms()
    ]  # fmt: skip
    return TrialOutcome(diagnosis=diagnosis, arms=tuple(rows))


@pytest.mark.parametrize(
    ("at", "stay", "excluded", "undecided"),
    [
        (0, [1, 2], [0, 1], True),  # a prediction: its bound is not tried again either
        (1, [0, 2, 3], [1], True),  # a bound says nothing of the rest
        (3, [0, 1, 2], [3], True),  # several: none of them is known to be the cause
    ],
)
def test_what_stays_and_what_is_tried_again(at: int, stay: list[int], excluded: list[int], undecided: bool) -> None:
    arms = _arms()
    broken = broken_by(arms[at], "IndexError: 7", arms)
    outcome = judged_without(broken, _outcome(2))
    assert outcome.arms == tuple(_outcome(2).arms[i] for i in stay)
    assert [i for i, arm in enumerate(arms) if broken.excludes(arm)] == excluded
    assert others_undecided(broken, outcome.arms) == undecided
    assert not others_undecided(broken, judged_without(broken, _outcome(6)).arms)
    said = [row.why for row in outcome.refused] + list(outcome.notes)
    assert len(said) == 1
    assert "IndexError: 7" in said[0]


class Slow:
    """A loader to wait for: a suspect without a GPU."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(2000):
            time.sleep(0.002)
            yield torch.randn(4, 8)


def test_the_error_of_a_loop_in_hand_says_what_was_on() -> None:
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    error = ValueError("mine")
    with perfdoctor.watch(warmup=2, active=3) as session:
        trial = session.trial(seconds=4)
        for batch in session.batches(Slow()):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if trial.running:
                trial.note(error)  # as the session does with what leaves its block
                if trial.broken is not None:
                    break
    assert trial.broken is not None
    assert error.__notes__ == [
        f"perfdoctor: the trial had {trial.broken.name} on here: not what the loop does by itself"
    ]
