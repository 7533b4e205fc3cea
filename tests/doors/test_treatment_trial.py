"""Treatments tried in an unmodified script: chosen by the diagnosis, its files gone, failures, the command line."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from perfdoctor.cli.run import split_command
from perfdoctor.cli.trial import execute
from perfdoctor.diagnose.finding import Binding, Diagnosis, Finding, Severity
from perfdoctor.doors.treatment_trial import TreatmentOptions, _ordered, try_treatments
from perfdoctor.emulate import emulate_cuda
from perfdoctor.errors import SessionError, UsageError
from perfdoctor.record.capture import Environment
from perfdoctor.treat.cures import OF_THE_LOADER
from perfdoctor.treat.switches import TREATMENTS
from perfdoctor.trial.treatment_time import TreatmentLimits
from perfdoctor.trial.treatments_trial import TreatmentsTrial

LIMITS = TreatmentLimits(seconds=60, each_seconds=3, rounds=6)
SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)
loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4, shuffle=True)
step = 0
while step < {steps}:
    for (x,) in loader:
        loss = model(x.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            torch.save(model.state_dict(), {path!r})
        if step == {steps}:
            break
"""


def _script(tmp_path: Path, steps: int) -> str:
    (tmp_path / "train.py").write_text(SCRIPT.format(steps=steps, path=str(tmp_path / "model.pt")))
    return str(tmp_path / "train.py")


def _options(*names: str, limits: TreatmentLimits = LIMITS) -> TreatmentOptions:
    return TreatmentOptions(names=names, limits=limits, warmup=1, active=3)


def test_verdicts_no_files_and_everything_as_before(tmp_path: Path) -> None:
    before = (torch.Tensor.backward, DataLoader.__iter__)
    run = try_treatments(_script(tmp_path, 10**9), (), _options("set_to_none", "dataloader_workers", "tf32"))
    by_name = {verdict.treatment: verdict for verdict in run.verdicts}
    # A schedule changes the rate at each step: equal losses show that it was put back each time.
    assert by_name["set_to_none"].parity.difference == 0
    assert by_name["set_to_none"].saving is not None
    assert by_name["dataloader_workers"].parity.difference == 0
    assert by_name["dataloader_workers"].parity.num_losses == 8
    assert by_name["tf32"].reason.startswith("does not fit")
    assert any("model.pt" in note for note in run.notes)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert (torch.Tensor.backward, DataLoader.__iter__) == before


def test_on_the_emulated_device_batches_are_prefetched_with_equal_losses(tmp_path: Path) -> None:
    with emulate_cuda() as device:
        options = _options("prefetch", "our_clip", "log_every_n", "bf16_autocast")
        options = TreatmentOptions(names=options.names, limits=LIMITS, warmup=1, active=3, hits=device.log)
        run = try_treatments(_script(tmp_path, 10**9), (), options)
    by_name = {verdict.treatment: verdict for verdict in run.verdicts}
    assert all(by_name[name].parity.difference == 0 for name in ("prefetch", "our_clip", "log_every_n"))
    assert (by_name["bf16_autocast"].parity.difference or 0.0) > 0
    assert "pageable-copy" in {finding.code for finding in run.diagnosis.findings}


DYING = """
import os, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
with open({runs!r}, "a") as file:
    file.write("run ")
while True:
    loss = model(torch.ones(2, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if optimizer.param_groups[0].get("fused"):
        raise torch.OutOfMemoryError("planned")
"""


def test_a_script_that_dies_of_a_treatment_is_run_again_for_the_others(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DYING.format(runs=str(tmp_path / "runs.txt")))
    options = _options("gc_frozen", "fused_optimizer", "set_to_none")
    run = try_treatments(str(tmp_path / "train.py"), (), options)
    names = [verdict.treatment for verdict in run.verdicts if " + " not in verdict.treatment]
    assert names == ["gc_frozen", "fused_optimizer", "set_to_none"]
    by_name = {verdict.treatment: verdict for verdict in run.verdicts}
    assert by_name["fused_optimizer"].reason == "failed: out of memory: OutOfMemoryError: planned"
    assert by_name["set_to_none"].parity.difference == 0
    assert not (tmp_path / "runs.txt").exists()


@pytest.mark.gpu
def test_on_a_gpu_memory_is_told_and_the_best_set_is_tried(tmp_path: Path) -> None:
    options = _options("prefetch", "fused_optimizer", "pin_memory", "our_clip", limits=TreatmentLimits(seconds=60))
    run = try_treatments(_script(tmp_path, 10**9), (), options)
    timed = [verdict for verdict in run.verdicts if verdict.saving is not None]
    assert {"prefetch", "fused_optimizer", "pin_memory"} <= {verdict.treatment for verdict in timed}
    for verdict in timed:
        assert verdict.parity.kept
        assert verdict.peak_memory_before_bytes is not None
        assert 0 < verdict.peak_memory_before_bytes < 10**9
        assert verdict.peak_memory_after_bytes is not None
    accepted = [verdict for verdict in timed if verdict.accepted and " + " not in verdict.treatment]
    assert any(" + " in verdict.treatment for verdict in run.verdicts) == (len(accepted) > 1)


def test_a_short_script_and_an_unknown_treatment(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match=r"ended before a treatment was tried: some [0-9]+ steps are watched"):
        try_treatments(_script(tmp_path, 3), (), _options("set_to_none"))
    with pytest.raises(UsageError, match="no treatment"):
        try_treatments(_script(tmp_path, 3), (), _options("magic"))


FAILING = """
import sys, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(int(sys.argv[1])):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
{end}
"""


@pytest.mark.parametrize(
    ("end", "code", "why"),
    [
        ("raise ValueError('of its own')", 1, "the script failed first (ValueError: of its own)"),
        ("sys.exit(7)", 7, "the script failed first (exit code 7)"),
        ("sys.exit(0)", 0, "the script ended first; let it run longer"),
    ],
)
def test_a_script_that_fails_of_its_own_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, code: int, why: str
) -> None:
    (tmp_path / "train.py").write_text(FAILING.format(end=end))
    words = ["--treat=tf32,set_to_none,gc_frozen", "--warmup", "1", "--active", "3", "--seconds", "60"]
    outcome = execute([*words, "--format", "json", str(tmp_path / "train.py"), "45"])
    verdicts = {row["treatment"]: row["reason"] for row in json.loads(outcome.text)["verdicts"]}
    assert verdicts["gc_frozen"] == f"not tried: {why}"
    assert outcome.exit_code == code
    assert "program.code" not in capsys.readouterr().err  # the traceback begins in the script
    with pytest.raises(SessionError, match="failed" if code else "ended before"):
        execute([*words, str(tmp_path / "train.py"), "5"])


INTERRUPTED = """
import signal, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
step = 0
while True:
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == {step}:
        signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.parametrize("step", [5, 60, 63, 300, 301, 302, 303, 500])
def test_who_presses_ctrl_c_is_obeyed(tmp_path: Path, step: int) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        _press_ctrl_c(tmp_path, step)
    finally:
        signal.signal(signal.SIGINT, before)


def _press_ctrl_c(tmp_path: Path, step: int) -> None:
    source = INTERRUPTED.format(step=step)
    (tmp_path / "train.py").write_text(source)
    words = ["--treat=tf32,gc_frozen,set_to_none", "--warmup", "1", "--active", "3", "--seconds", "60"]
    try:
        outcome = execute([*words, "--format", "json", str(tmp_path / "train.py")])
    except KeyboardInterrupt:
        assert step < 100  # nothing was judged by then
        return
    assert outcome.exit_code == 130
    assert outcome.messages == ("interrupted",)
    reasons = {row["treatment"]: row["reason"] for row in json.loads(outcome.text)["verdicts"]}
    assert reasons["set_to_none"] == "not tried: interrupted"
    assert not any("KeyboardInterrupt" in reason for reason in reasons.values())


@pytest.mark.parametrize("data", ["[torch.randn(8) for _ in range(64)]", "Slotted()"])
def test_a_data_set_without_attributes_stops_nothing(tmp_path: Path, data: str) -> None:
    slotted = (
        "class Slotted:\n    __slots__ = ()\n    def __len__(self):\n        return 64\n"
        "    def __getitem__(self, i):\n        return torch.zeros(8)\n"
    )
    source = SCRIPT.format(steps=10**9, path=str(tmp_path / "model.pt")).replace("(x,)", "x")
    source = source.replace("TensorDataset(torch.randn(64, 8))", data).replace(
        "torch.manual_seed", slotted + "torch.manual_seed"
    )
    (tmp_path / "train.py").write_text(source)
    run = try_treatments(str(tmp_path / "train.py"), (), _options("dataloader_workers", "set_to_none"))
    assert {verdict.treatment for verdict in run.verdicts} >= {"dataloader_workers", "set_to_none"}
    assert next(v for v in run.verdicts if v.treatment == "set_to_none").saving is not None


def test_an_error_of_the_trial_itself_is_not_taken_for_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: TreatmentsTrial, stamp: object) -> None:
        raise LookupError("ours")

    monkeypatch.setattr(TreatmentsTrial, "step_ended", broken)
    with pytest.raises(LookupError, match="ours"):
        try_treatments(_script(tmp_path, 10**9), (), _options("set_to_none"))
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("names", ["fused_optimizer", "prefetch,gc_frozen"])
def test_names_behind_a_space_are_explained(names: str) -> None:
    with pytest.raises(UsageError, match=f"--treat={names} SCRIPT.py"):
        execute(["--treat", names, "train.py"])


def test_what_the_time_does_not_allow_is_said(tmp_path: Path) -> None:
    limits = TreatmentLimits(seconds=1.0, each_seconds=1.0, rounds=6)
    run = try_treatments(_script(tmp_path, 10**9), (), _options("set_to_none", "gc_frozen", limits=limits))
    assert [verdict.treatment for verdict in run.verdicts] == ["set_to_none", "gc_frozen"]
    last = run.verdicts[-1]
    assert last.reason.startswith("not timed: 6 rounds of blocks of ")
    assert last.reason.endswith(" s were left (--seconds)")
    assert last.needed_s > 0


def test_the_command_to_go_on_names_the_script_and_its_arguments(tmp_path: Path) -> None:
    script = _script(tmp_path, 10**9)
    few = ["--warmup", "1", "--active", "3", "--seconds", "1", "--treat=set_to_none,gc_frozen"]
    page = execute([*few, script, "--data", "a b"]).text
    command = page.partition("To go on:\n")[2].partition("\n\n")[0].replace("\\\n", "")  # as a shell reads it
    words = shlex.split(command)
    assert words[:2] == ["perfdoctor", "trial"]
    assert words[2].startswith("--treat=")
    again = split_command(words[2:])
    # What does not fit needs some 2 s, and three quarters of the time are for such: a minute to start with, and 10 s.
    assert again.own[1:] == ("--seconds", "70", "--warmup", "1", "--active", "3")
    assert (again.target, again.arguments) == (script, ("--data", "a b"))
    assert json.loads(execute([*few, "--format", "json", script]).text)["again"].endswith(script)


def _names_ordered(*codes: str) -> list[str]:
    diagnosis = Diagnosis(
        source="",
        environment=Environment(),
        step=None,
        binding=Binding.UNKNOWN,
        accounting=None,
        findings=tuple(Finding(code=code, severity=Severity.COST, title=code) for code in codes),
        leave_alone=(),
    )
    return [each.name for each in _ordered(TREATMENTS, diagnosis)]


def test_those_that_cure_what_was_found_come_first_and_compilation_last_but_for_the_loader_s() -> None:
    names = _names_ordered("garbage-collection")
    assert names[0] == "gc_frozen"
    assert set(names[-4:]) == OF_THE_LOADER  # longer blocks
    assert all(name.startswith("compile") for name in names[-7:-4])
    assert sorted(names) == sorted(each.name for each in TREATMENTS)


def test_a_loader_that_is_what_was_found_is_tried_first() -> None:
    # One that came last once found no time, though it alone cured the only finding.
    names = _names_ordered("data-wait", "host-sync", "fusion")
    assert names[:5] == ["prefetch", "persistent_workers", "dataloader_workers", "log_every_n", "compile"]
    assert names[-1] == "pin_memory"


@pytest.mark.parametrize(
    "own", [("--treat",), ("--treat=a,b",), ("--seconds", "30", "--treat"), ("--treat", "--steps=3")]
)
def test_the_script_is_found_behind_the_option(own: tuple[str, ...]) -> None:
    command = split_command([*own, "train.py", "--treat", "x"])
    assert (command.own, command.target, command.arguments) == (own, "train.py", ("--treat", "x"))


def test_the_command_line_prints_json_and_text(tmp_path: Path) -> None:
    script = _script(tmp_path, 10**9)
    few = ["--warmup", "1", "--active", "3", "--seconds", "20", "--treat=set_to_none,tf32"]
    document = json.loads(execute([*few, "--format", "json", script]).text)
    assert {row["treatment"] for row in document["verdicts"]} == {"set_to_none", "tf32"}
    page = execute([*few, script]).text
    assert page.startswith(f"Treatments of {script}")
    assert "Does not fit this loop\n   tf32  TF32 needs a CUDA device" in page


# Its batches come from a generator of its own and grow: no two blocks of steps see the same.
STREAM = """
import time, torch
data = torch.randn(4000, 8)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)

def batches():
    at = 0
    while True:
        yield data[at % 3000 : at % 3000 + 4] * (1 + at / 400)
        at += 4

for x in batches():
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    if not optimizer.param_groups[0].get("fused"):
        time.sleep(0.006)
    optimizer.zero_grad()
    with open({path!r}, "a") as file:
        file.write("step ")
"""


def test_what_one_process_cannot_compare_is_judged_in_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STREAM.format(path=str(tmp_path / "log.txt")))
    limits = TreatmentLimits(seconds=100, each_seconds=2, rounds=6)
    run = try_treatments(str(tmp_path / "train.py"), (), _options("fused_optimizer", limits=limits))
    (verdict,) = run.verdicts
    assert verdict.accepted, verdict.reason
    assert verdict.num_processes >= 12
    assert "other batches each time" in verdict.why_processes
    assert verdict.saving is not None
    assert verdict.saving.mid_ns > 0.8 * 6e6  # the pause that comes without it
    assert verdict.parity.num_losses == 8
    assert any("processes ran the script from its start" in note for note in run.notes)
    assert any("log.txt" in note for note in run.notes)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.gpu
def test_on_a_gpu_the_choice_of_cudnn_is_judged_in_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CONVOLVING)
    limits = TreatmentLimits(seconds=240, each_seconds=5, rounds=6)
    options = _options("cudnn_benchmark", "set_to_none", limits=limits)
    run = try_treatments(str(tmp_path / "train.py"), (), options)
    by_name = {verdict.treatment: verdict for verdict in run.verdicts}
    verdict = by_name["cudnn_benchmark"]
    assert verdict.num_processes >= 12, verdict.reason
    assert verdict.saving is not None, verdict.reason
    assert verdict.parity.kept, verdict.parity.text
    assert verdict.peak_memory_before_bytes is not None
    assert verdict.peak_memory_after_bytes is not None
    assert by_name["set_to_none"].num_processes == 0


CONVOLVING = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3, padding=1),
    torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
images, labels = torch.randn(32, 3, 64, 64, device="cuda"), torch.randint(10, (32,), device="cuda")
while True:
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
