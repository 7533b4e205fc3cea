"""perfdoctor finds the lines that make a PyTorch training loop slow, and what would come back without them.

    with perfdoctor.watch(warmup=5, active=10) as session:
        for batch in session.batches(loader):
            train_step(batch)
    print(session.diagnosis())

    print(perfdoctor.analyze("trace.json.gz"))

Names are loaded when they are first used: importing perfdoctor imports neither torch nor numpy.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfdoctor.version import VERSION as __version__

if TYPE_CHECKING:
    from perfdoctor.bench.measurement import Measurement as Measurement
    from perfdoctor.bench.profile_table import ProfileTable as ProfileTable
    from perfdoctor.bench.profile_table import profile_table as profile_table
    from perfdoctor.bench.timing import benchmark as benchmark
    from perfdoctor.diagnose.finding import Accounting as Accounting
    from perfdoctor.diagnose.finding import Advice as Advice
    from perfdoctor.diagnose.finding import Binding as Binding
    from perfdoctor.diagnose.finding import Diagnosis as Diagnosis
    from perfdoctor.diagnose.finding import Finding as Finding
    from perfdoctor.diagnose.finding import Headroom as Headroom
    from perfdoctor.diagnose.finding import Saving as Saving
    from perfdoctor.diagnose.finding import Severity as Severity
    from perfdoctor.diagnose.finding import Skipped as Skipped
    from perfdoctor.diagnose.finding import StepTime as StepTime
    from perfdoctor.doors.analysis import analyze as analyze
    from perfdoctor.doors.huggingface import PerfDoctorTrainerCallback as PerfDoctorTrainerCallback
    from perfdoctor.doors.lightning import PerfDoctorCallback as PerfDoctorCallback
    from perfdoctor.doors.long_session import LongRun as LongRun
    from perfdoctor.doors.long_session import LongSession as LongSession
    from perfdoctor.doors.session import Session as Session
    from perfdoctor.doors.trial import LiveTrial as LiveTrial
    from perfdoctor.emulate import emulate_cuda as emulate_cuda
    from perfdoctor.errors import BrokenTraceError as BrokenTraceError
    from perfdoctor.errors import CaptureError as CaptureError
    from perfdoctor.errors import NonFiniteError as NonFiniteError
    from perfdoctor.errors import NotATraceError as NotATraceError
    from perfdoctor.errors import PerfDoctorError as PerfDoctorError
    from perfdoctor.errors import SessionError as SessionError
    from perfdoctor.errors import StaleBatchError as StaleBatchError
    from perfdoctor.errors import SyncBudgetExceeded as SyncBudgetExceeded
    from perfdoctor.errors import TreatmentRefused as TreatmentRefused
    from perfdoctor.errors import TrialRefused as TrialRefused
    from perfdoctor.errors import UnsupportedTraceError as UnsupportedTraceError
    from perfdoctor.errors import UsageError as UsageError
    from perfdoctor.kernels.grad_stats import clip_grad_norm_ as clip_grad_norm_
    from perfdoctor.kernels.grad_stats import grad_norm as grad_norm
    from perfdoctor.kernels.grad_stats import grad_stats as grad_stats
    from perfdoctor.record.capture import Capture as Capture
    from perfdoctor.record.capture import Environment as Environment
    from perfdoctor.record.capture import Frame as Frame
    from perfdoctor.record.capture import Site as Site
    from perfdoctor.record.load import load_capture as load_capture
    from perfdoctor.report.page import Report as Report
    from perfdoctor.report.tensorboard import write_diagnosis as write_diagnosis
    from perfdoctor.report.tensorboard import write_step_times as write_step_times
    from perfdoctor.report.trial import TrialReport as TrialReport
    from perfdoctor.treat.compiled import CompiledModel as CompiledModel
    from perfdoctor.treat.compiled import CompileReport as CompileReport
    from perfdoctor.treat.compiled import compile_model as compile_model
    from perfdoctor.treat.device_metrics import DeviceMetrics as DeviceMetrics
    from perfdoctor.treat.graph_break_reasons import GraphBreak as GraphBreak
    from perfdoctor.treat.graph_breaks import GraphBreaks as GraphBreaks
    from perfdoctor.treat.graph_breaks import graph_breaks as graph_breaks
    from perfdoctor.treat.graph_obstacle import GraphObstacles as GraphObstacles
    from perfdoctor.treat.graph_obstacle import Obstacle as Obstacle
    from perfdoctor.treat.graph_obstacles import graph_obstacles as graph_obstacles
    from perfdoctor.treat.graphed_step import FrozenStateWarning as FrozenStateWarning
    from perfdoctor.treat.graphed_step import GraphedStep as GraphedStep
    from perfdoctor.treat.graphed_step import GraphLimitWarning as GraphLimitWarning
    from perfdoctor.treat.graphed_step import graphed_step as graphed_step
    from perfdoctor.treat.metric_readings import MetricValue as MetricValue
    from perfdoctor.treat.metric_readings import Reading as Reading
    from perfdoctor.treat.nonfinite import NonFiniteWatch as NonFiniteWatch
    from perfdoctor.treat.nonfinite_hits import NonFiniteHit as NonFiniteHit
    from perfdoctor.treat.prefetch import DevicePrefetcher as DevicePrefetcher
    from perfdoctor.treat.recompilations import Recompilation as Recompilation
    from perfdoctor.treat.switches import TREATMENTS as TREATMENTS
    from perfdoctor.treat.treatment import Loop as Loop
    from perfdoctor.treat.treatment import Numerics as Numerics
    from perfdoctor.treat.treatment import Treatment as Treatment
    from perfdoctor.trial.outcome import ArmResult as ArmResult
    from perfdoctor.trial.outcome import TrialOutcome as TrialOutcome
    from perfdoctor.trial.verdict import Verdict as Verdict
    from perfdoctor.watch.annotate import annotate as annotate
    from perfdoctor.watch.module_ranges import module_ranges as module_ranges
    from perfdoctor.watch.outliers import Bill as Bill
    from perfdoctor.watch.outliers import Outlier as Outlier
    from perfdoctor.watch.sync_guard import allow_sync as allow_sync
    from perfdoctor.watch.sync_guard import sync_guard as sync_guard

_HOMES = {
    "perfdoctor.bench.measurement": ("Measurement",),
    "perfdoctor.bench.profile_table": ("ProfileTable", "profile_table"),
    "perfdoctor.bench.timing": ("benchmark",),
    "perfdoctor.diagnose.finding": (
        "Accounting", "Advice", "Binding", "Diagnosis", "Finding", "Headroom", "Saving", "Severity", "Skipped",
        "StepTime",
    ),
    "perfdoctor.doors.analysis": ("analyze",),
    "perfdoctor.doors.huggingface": ("PerfDoctorTrainerCallback",),
    "perfdoctor.doors.lightning": ("PerfDoctorCallback",),
    "perfdoctor.doors.long_session": ("LongRun", "LongSession"),
    "perfdoctor.doors.session": ("Session", "watch"),
    "perfdoctor.doors.trial": ("LiveTrial",),
    "perfdoctor.emulate": ("emulate_cuda",),
    "perfdoctor.errors": (
        "BrokenTraceError", "CaptureError", "NonFiniteError", "NotATraceError", "PerfDoctorError", "SessionError",
        "StaleBatchError", "SyncBudgetExceeded", "TreatmentRefused", "TrialRefused", "UnsupportedTraceError",
        "UsageError",
    ),
    "perfdoctor.kernels.grad_stats": ("clip_grad_norm_", "grad_norm", "grad_stats"),
    "perfdoctor.record.capture": ("Capture", "Environment", "Frame", "Site"),
    "perfdoctor.record.load": ("load_capture",),
    "perfdoctor.report.page": ("Report",),
    "perfdoctor.report.tensorboard": ("write_diagnosis", "write_step_times"),
    "perfdoctor.report.trial": ("TrialReport",),
    "perfdoctor.treat.compiled": ("CompileReport", "CompiledModel", "compile_model"),
    "perfdoctor.treat.device_metrics": ("DeviceMetrics",),
    "perfdoctor.treat.graph_break_reasons": ("GraphBreak",),
    "perfdoctor.treat.graph_breaks": ("GraphBreaks", "graph_breaks"),
    "perfdoctor.treat.graph_obstacle": ("GraphObstacles", "Obstacle"),
    "perfdoctor.treat.graph_obstacles": ("graph_obstacles",),
    "perfdoctor.treat.graphed_step": ("FrozenStateWarning", "GraphLimitWarning", "GraphedStep", "graphed_step"),
    "perfdoctor.treat.metric_readings": ("MetricValue", "Reading"),
    "perfdoctor.treat.nonfinite": ("NonFiniteWatch",),
    "perfdoctor.treat.nonfinite_hits": ("NonFiniteHit",),
    "perfdoctor.treat.prefetch": ("DevicePrefetcher",),
    "perfdoctor.treat.recompilations": ("Recompilation",),
    "perfdoctor.treat.switches": ("TREATMENTS",),
    "perfdoctor.treat.treatment": ("Loop", "Numerics", "Treatment"),
    "perfdoctor.trial.outcome": ("ArmResult", "TrialOutcome"),
    "perfdoctor.trial.verdict": ("Verdict",),
    "perfdoctor.watch.annotate": ("annotate",),
    "perfdoctor.watch.module_ranges": ("module_ranges",),
    "perfdoctor.watch.outliers": ("Bill", "Outlier"),
    "perfdoctor.watch.sync_guard": ("allow_sync", "sync_guard"),
}  # fmt: skip

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'perfdoctor' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})


class _Package(ModuleType):
    """The package, on which `watch` stays the function.

    Importing anything from the folder `perfdoctor/watch/` makes Python set the attribute `watch` to that folder's
    module. A property with a setter that does nothing keeps `perfdoctor.watch(...)` callable.
    """

    @property
    def watch(self) -> Any:
        """`perfdoctor.doors.session.watch`."""
        return __getattr__("watch")

    @watch.setter
    def watch(self, _: object) -> None:
        pass


sys.modules[__name__].__class__ = _Package
