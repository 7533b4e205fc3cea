"""Report: a Diagnosis that shows itself."""

from __future__ import annotations

import io
import pickle
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from perfdoctor import analyze, load_capture
from perfdoctor.diagnose import diagnose
from perfdoctor.diagnose.finding import Binding, Diagnosis, Finding, Severity, Skipped
from perfdoctor.record.capture import Environment, Note
from perfdoctor.report.page import Report
from perfdoctor.treat.cures import CURES
from perfdoctor.treat.switches import TREATMENTS
from perfdoctor.treat.treatment import Loop


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_report_is_a_diagnosis_with_the_same_fields(diagnosis: Diagnosis) -> None:
    report = Report.of(diagnosis)
    assert isinstance(report, Diagnosis)
    shared = [f.name for f in fields(diagnosis) if f.name not in ("findings", "leave_alone")]
    assert all(getattr(report, name) == getattr(diagnosis, name) for name in shared)
    untreated = [replace(found, treatments=()) for found in report.findings]
    assert untreated == [replace(found, treatments=()) for found in diagnosis.findings]


def test_report_names_the_treatments_of_each_finding(diagnosis: Diagnosis) -> None:
    sync = next(found for found in diagnosis.findings if found.code == "host-sync")
    (found,) = Report.of(replace(diagnosis, findings=(sync,))).findings
    assert found.treatments == ("log_every_n",)
    masked = replace(sync, kind="boolean_mask")
    (found,) = Report.of(replace(diagnosis, findings=(masked,))).findings
    assert found.treatments == ()


def loop(**facts: object) -> Diagnosis:
    """A loop with one finding of each code that a treatment cures, and what is known of its surroundings."""
    codes: Any = facts.pop("codes", sorted({code for codes in CURES.values() for code in codes}))
    found = tuple(Finding(code=code, severity=Severity.COST, title=code) for code in codes)
    rows = {"skipped": (), "notes": (), "source": "train.py", **{k: v for k, v in facts.items() if k in _FIELDS}}
    known = {name: value for name, value in facts.items() if name not in _FIELDS}
    return Diagnosis(
        step=None, accounting=None, binding=Binding.UNKNOWN, findings=found, leave_alone=(),
        environment=Environment(**known), **rows,
    )  # fmt: skip


_FIELDS = ("skipped", "notes", "source")
_LOADERS = {"prefetch", "dataloader_workers", "pin_memory", "persistent_workers"}
_NO_LOADER = (Skipped(check="data-wait", why="no mark of the loader in the recording"),)


def offered(diagnosis: Diagnosis) -> set[str]:
    return {name for finding in Report.of(diagnosis).findings for name in finding.treatments}


def test_only_treatments_that_can_be_in_place_are_offered() -> None:
    everything = {name for name, codes in CURES.items() if codes}
    assert offered(loop()) == everything  # a trace: nothing is known
    assert offered(loop(skipped=_NO_LOADER)) == everything - _LOADERS
    bare = (Note(code="no-steps", text="no steps are marked"),)
    assert offered(loop(skipped=_NO_LOADER, notes=bare)) == everything  # a trace of the device alone
    assert offered(loop(skipped=_NO_LOADER, notes=bare, num_cpus=4.0)) == everything - _LOADERS  # watched by us
    assert offered(loop(source="session")) == everything - _LOADERS  # batches of something that is no DataLoader
    assert offered(loop(num_workers=0, num_cpus=4.0)) == everything - {"persistent_workers"}
    assert offered(loop(num_workers=2, pin_memory=True)) == everything - {"pin_memory"}
    # Samples that wait for files gain from 4 to 8 workers on one CPU: whether they do, the treatment sees itself.
    assert offered(loop(num_workers=0, num_cpus=1.0)) == everything - {"persistent_workers"}
    assert offered(loop(num_workers=1, num_cpus=2.0)) == everything
    assert offered(loop(num_workers=8, num_cpus=2.0)) == everything - {"dataloader_workers"}
    assert offered(loop(num_workers=8, num_cpus=64.0)) == everything
    assert "persistent_workers" not in offered(loop(codes=("data-wait",)))  # workers that nobody saw
    assert "persistent_workers" in offered(loop(codes=("data-wait",), num_workers=2))
    assert offered(loop(fused_optimizer=True)) == everything - {"fused_optimizer"}


def test_what_each_treatment_refuses_on_the_cpu_is_not_offered_to_a_loop_without_cuda() -> None:
    """Against the treatments themselves: a whole loop on the CPU, asked what it refuses for want of a GPU."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2))
    loader: Any = torch.utils.data.DataLoader(torch.zeros(8, 3, 8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cpu = Loop(device=torch.device("cpu"), model=model, optimizers=(optimizer,), loader=loader,
               train_step=lambda x: model(x).sum(), sample_batch=(torch.zeros(1, 3, 8, 8),))  # fmt: skip
    refusals = {each.name: each.refuses(cpu) or "" for each in TREATMENTS}
    want_a_gpu = {name for name, why in refusals.items() if "cpu" in why or "CUDA" in why}
    kept = offered(loop(notes=(Note(code="no-gpu", text="no CUDA"),)))
    assert len(want_a_gpu) > 4
    assert kept == {name for name, codes in CURES.items() if codes} - want_a_gpu


def test_print_is_plain_in_a_pipe_and_coloured_in_a_terminal(
    diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report.of(diagnosis)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert str(report) == report.to_text().rstrip("\n")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert "\x1b[" in str(report)
    assert "\x1b[" not in report.to_text()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in str(report)


def test_notebook_gets_a_fragment_and_files_a_page(diagnosis: Diagnosis) -> None:
    report = Report.of(diagnosis)
    assert report._repr_html_().startswith("<div")
    assert report.to_html().startswith("<!doctype html>")
    assert report.to_json().startswith("{")


EXAMPLE = Path(__file__).parents[2] / "examples" / "slow_loop.perfdoctor"


def test_the_page_holds_a_picture_of_one_step_where_the_recording_is_at_hand() -> None:
    report = analyze(EXAMPLE)
    page = report.to_html()
    picture = re.search(r'<div class="timeline">(.*?)</div>', page, re.DOTALL)
    assert picture is not None
    root = ElementTree.fromstring(picture[1])
    texts = [label.text for label in root if label.tag.endswith("text")]
    assert {"slow_loop.py:90", "149 x", "GPU idle, by cause"} <= set(texts)
    assert 'class="timeline"' in report._repr_html_()
    assert 'class="timeline"' in report.with_advice("a remark").to_html()
    copied = pickle.loads(pickle.dumps(report))
    assert copied == report
    assert 'class="timeline"' not in copied.to_html()


def test_one_cause_has_one_colour_in_the_bar_and_in_the_picture() -> None:
    page = analyze(EXAMPLE).to_html()
    bar = dict(re.findall(r'<li><i style="background:(#\w+)"></i>(idle: [\w-]+) ', page))
    drawn = set(re.findall(r'fill="(#\w+)"[^>]*><title>(idle: [\w-]+)</title>', page.partition('"timeline"')[2]))
    assert len(bar) > 4
    assert set(bar.items()) == drawn


def test_the_picture_is_of_the_rank_that_the_page_is_of() -> None:
    capture = load_capture(EXAMPLE)
    ranks = [replace(capture, environment=replace(capture.environment, rank=rank)) for rank in (0, 1)]
    for judged in ranks:
        assert Report.of(diagnose(judged), ranks)._recording is judged
    assert 'class="timeline"' not in Report.of(diagnose(ranks[0]), ranks[1:]).to_html()
