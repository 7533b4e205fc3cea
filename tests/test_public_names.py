"""The public surface: adding or losing a name is a decision, made here."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

import perfdoctor
from perfdoctor.diagnose.finding import Diagnosis

NAMES = [
    "Accounting", "Advice", "ArmResult", "Bill", "Binding", "BrokenTraceError", "Capture", "CaptureError",
    "CompileReport", "CompiledModel", "DeviceMetrics", "DevicePrefetcher", "Diagnosis", "Environment", "Finding",
    "Frame", "FrozenStateWarning", "GraphBreak", "GraphBreaks", "GraphLimitWarning", "GraphObstacles", "GraphedStep",
    "Headroom", "LiveTrial", "LongRun", "LongSession", "Loop", "Measurement", "MetricValue", "NonFiniteError",
    "NonFiniteHit", "NonFiniteWatch", "NotATraceError", "Numerics", "Obstacle", "Outlier", "PerfDoctorCallback",
    "PerfDoctorError", "PerfDoctorTrainerCallback", "ProfileTable", "Reading", "Recompilation", "Report", "Saving",
    "Session", "SessionError", "Severity", "Site", "Skipped", "StaleBatchError", "StepTime", "SyncBudgetExceeded",
    "TREATMENTS", "Treatment", "TreatmentRefused", "TrialOutcome", "TrialRefused", "TrialReport",
    "UnsupportedTraceError", "UsageError", "Verdict", "allow_sync", "analyze", "annotate", "benchmark",
    "clip_grad_norm_", "compile_model", "emulate_cuda", "grad_norm", "grad_stats", "graph_breaks", "graph_obstacles",
    "graphed_step", "load_capture", "module_ranges", "profile_table", "sync_guard", "watch", "write_diagnosis",
    "write_step_times",
]  # fmt: skip


def test_public_names() -> None:
    assert sorted(perfdoctor.__all__) == sorted(["__version__", *NAMES])
    assert set(NAMES) <= set(dir(perfdoctor))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(name: str) -> None:
    named = getattr(perfdoctor, name)
    assert named is not None
    assert name.isupper() or named.__name__ == name


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'wacth'"):
        _ = perfdoctor.wacth  # type: ignore[attr-defined]


def test_watch_stays_the_function_when_its_folder_is_imported() -> None:
    from perfdoctor.doors.session import watch

    assert "perfdoctor.watch" in sys.modules  # the folder of that name
    assert perfdoctor.watch is watch


def test_report_is_what_analyze_promises() -> None:
    assert issubclass(perfdoctor.Report, Diagnosis)


def test_version_is_the_package_s() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    assert perfdoctor.__version__ == project["version"]
