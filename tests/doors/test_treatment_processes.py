"""Single processes of a trial: what they find, how they end, and that nothing of theirs stays."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfdoctor.doors.treatment_processes import TreatmentProcesses
from perfdoctor.trial.process_run import ProcessOrder, ProcessRun

SCRIPT = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(40, 8)), batch_size=4, shuffle=True)
torch.save(model.state_dict(), "model.pt")
print(sys.argv[1])
step = 0
while True:
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        LINE
"""


class Tried:
    """Processes of a script in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.until = time.perf_counter() + 60

    def __call__(self, line: str, *orders: tuple[tuple[str, ...], int, bool]) -> list[ProcessRun | None]:
        (self.folder / "train.py").write_text(SCRIPT.replace("LINE", line))
        order = ProcessOrder(target=str(self.folder / "train.py"), arguments=("--lr=1",))
        left = self.until
        with TreatmentProcesses(order, dict(os.environ), lambda: left - time.perf_counter()) as processes:
            self.scratch = Path(processes._folder)
            return [processes.run(*each) for each in orders]


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tried]:
    monkeypatch.chdir(tmp_path)
    found = Tried(tmp_path)
    yield found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]
    assert not found.scratch.exists()


def _whole(run: ProcessRun | None) -> ProcessRun:
    assert run is not None
    assert not run.failure
    return run


def test_processes_start_alike_and_take_the_same_batches(tried: Tried) -> None:
    """Nothing in the script seeds: model, order of the batches and masks are alike all the same."""
    plain, workers = map(_whole, tried("pass", ((), 0, True), (("dataloader_workers",), 30, True)))
    assert plain.names == ()
    assert workers.names == ("dataloader_workers",)
    assert len(plain.losses) == len(plain.dry_losses) == 8
    assert plain.losses == workers.losses
    assert plain.dry_losses == workers.dry_losses
    assert plain.losses != plain.dry_losses
    assert len(plain.step_ns) % 10 == 0  # whole epochs
    assert len(workers.step_ns) == 30
    assert workers.num_steps == 4 + 2 * 8 + 8 + 30  # looked at, losses twice, settled, timed
    assert all(ns > 0 for ns in plain.step_ns)
    assert any("model.pt" in note for note in plain.notes)


def test_a_treatment_is_on_while_steps_are_timed(tried: Tried) -> None:
    line = "time.sleep(0.001 if optimizer.param_groups[0].get('fused') else 0.011)"
    plain, fused = map(_whole, tried(line, ((), 20, False), (("fused_optimizer",), 20, False)))
    assert min(plain.step_ns) >= 11e6
    assert sum(fused.step_ns) / 20 < sum(plain.step_ns) / 20 - 5e6
    assert plain.dry_losses == ()


def test_failures_are_told(tried: Tried) -> None:
    line = "if optimizer.param_groups[0].get('fused'): raise RuntimeError('planned')"
    failed, unfit = tried(line, (("fused_optimizer",), 20, False), (("tf32",), 20, False))
    assert failed is not None
    assert failed.failure == "failed: RuntimeError: planned"
    assert failed.started
    assert failed.step_ns == ()
    assert unfit is not None
    assert "does not fit: TF32 needs a CUDA device" in unfit.failure
    assert not unfit.started


def test_of_several_the_unfit_one_is_left_out(tried: Tried) -> None:
    (run,) = tried("pass", (("tf32", "fused_optimizer", "set_to_none"), 20, False))
    assert _whole(run).names == ("fused_optimizer", "set_to_none")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("if step == 9: sys.exit()", "the script ended after 9 steps"),
        ("if step == 9: sys.exit(3)", "failed: the script ended with exit code 3"),
        ("if step == 9: import os; os._exit(4)", "failed: the script ended with exit code 4"),
        ("if step == 9: import os; os._exit(0)", "the script ended after 9 steps"),
        ("if step == 9: import os; os.kill(os.getpid(), 9)", "ended with -9"),
    ],
)
def test_scripts_that_end_first(tried: Tried, line: str, text: str) -> None:
    (run,) = tried(line, ((), 20, False))
    assert run is not None
    assert text in run.failure
    assert run.step_ns == ()


def test_a_process_that_hangs_is_ended_in_time_with_its_children(tried: Tried) -> None:
    tried.until = time.perf_counter() + 8
    line = "import subprocess; subprocess.run(['sleep', '1234.5'])"
    assert tried(line, ((), 20, False)) == [None]
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _readable(path)]
    assert not any(b"1234.5" in command for command in commands)


def test_a_server_that_was_not_ready_in_time_does_not_answer_the_first_order(tmp_path: Path) -> None:
    """Its `ready` came later, and was taken for the end of the first process."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("LINE", "pass"))
    order = ProcessOrder(target=str(tmp_path / "train.py"), arguments=("--lr=1",))
    left = [0.0]  # spent when the server starts
    with TreatmentProcesses(order, dict(os.environ), lambda: left.pop(0) if left else 60.0) as processes:
        run = processes.run((), 20, False)
    assert run is not None
    assert run.failure == ""
    assert len(run.step_ns) == 20


def _readable(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False
