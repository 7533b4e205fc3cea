"""Report: a Diagnosis that shows itself."""

from __future__ import annotations

import io
import sys
from dataclasses import fields, replace

import pytest

from perfdoctor.diagnose.finding import Diagnosis
from perfdoctor.report.page import Report


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
