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
    from perfdoctor.diagnose.finding import Accounting as Accounting
    from perfdoctor.diagnose.finding import Advice as Advice
    from perfdoctor.diagnose.finding import Binding as Binding
    from perfdoctor.diagnose.finding import Diagnosis as Diagnosis
    from perfdoctor.diagnose.finding import Finding as Finding
    from perfdoctor.diagnose.finding import Headroom as Headroom
    from perfdoctor.diagnose.finding import Severity as Severity
    from perfdoctor.diagnose.finding import Skipped as Skipped
    from perfdoctor.diagnose.finding import StepTime as StepTime
    from perfdoctor.doors.analysis import analyze as analyze
    from perfdoctor.doors.session import Session as Session
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
    from perfdoctor.treat.treatment import Loop as Loop
    from perfdoctor.treat.treatment import Numerics as Numerics
    from perfdoctor.treat.treatment import Treatment as Treatment
    from perfdoctor.watch.annotate import annotate as annotate
    from perfdoctor.watch.module_ranges import module_ranges as module_ranges
    from perfdoctor.watch.sync_guard import allow_sync as allow_sync
    from perfdoctor.watch.sync_guard import sync_guard as sync_guard

_HOMES = {
    "perfdoctor.diagnose.finding": (
        "Accounting", "Advice", "Binding", "Diagnosis", "Finding", "Headroom", "Severity", "Skipped", "StepTime",
    ),
    "perfdoctor.doors.analysis": ("analyze",),
    "perfdoctor.doors.session": ("Session", "watch"),
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
    "perfdoctor.treat.treatment": ("Loop", "Numerics", "Treatment"),
    "perfdoctor.watch.annotate": ("annotate",),
    "perfdoctor.watch.module_ranges": ("module_ranges",),
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
