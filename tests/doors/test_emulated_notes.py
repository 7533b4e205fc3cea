"""Whatever watched a loop on the emulated device says so on its page, and says nothing of the kind elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import perfdoctor
from perfdoctor.diagnose.hit_counts import EMULATED

SAID = "emulated CUDA device. Lines and counts are those of a GPU, times are those of the CPU"


def train(session: Any, device: str, steps: int) -> None:
    model = torch.nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = session.batches(DataLoader(TensorDataset(torch.ones(2 * steps, 8)), batch_size=2))
    for (x,) in batches:
        loss = model(x.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


def one_line(page: str) -> str:
    return " ".join(page.split())


def test_a_session_says_it_in_text_html_and_json() -> None:
    with perfdoctor.emulate_cuda(), perfdoctor.watch(warmup=2, active=3) as session:
        train(session, "cuda", 40)
    report = session.diagnosis()
    for page in (report.to_text(), report.to_html(), report.to_json()):
        assert one_line(page).count(SAID) == 1
    assert [note.code for note in session.capture.notes].count(EMULATED) == 1
    # A wait on that device is the CPU doing the arithmetic: no time of a GPU's.
    assert all(finding.host_blocked_ns is None for finding in report.findings if finding.code == "host-sync")


def test_a_loop_on_the_cpu_is_not_said_to_be_emulated() -> None:
    with perfdoctor.watch(warmup=2, active=3) as session:
        train(session, "cpu", 40)
    assert "emulated" not in session.diagnosis().to_text()


def test_a_trials_own_page_says_it_before_that_of_the_diagnosis() -> None:
    with perfdoctor.emulate_cuda(), perfdoctor.watch(warmup=2, active=3) as session:
        trial = session.trial(steps=400, seconds=5)
        train(session, "cuda", 200)
    page = one_line(trial.report().to_text())
    assert page.index(SAID) < page.index("perfdoctor: ")
    assert page.count(SAID) == 2  # on that of the diagnosis too


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore:You called `self.log")  # Lightning's own
def test_a_lightning_fit_says_it(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning_fits", reason="needs pytorch-lightning")
    callback = perfdoctor.PerfDoctorCallback(warmup=2, active=3, report_dir=tmp_path / "reports")
    with perfdoctor.emulate_cuda():
        lightning.fit(tmp_path, [callback], accelerator="gpu")
    assert one_line((tmp_path / "reports" / "perfdoctor.txt").read_text()).count(SAID) == 1
    assert SAID in (tmp_path / "reports" / "perfdoctor.json").read_text()
