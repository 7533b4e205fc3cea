"""Every error perfdoctor raises on purpose.

    PerfDoctorError
    |-- CaptureError               a recording cannot be read or is not one
    |   |-- NotATraceError         the file is something else (named, with what to do)
    |   |-- UnsupportedTraceError  a trace of a kind or version that is not read
    |   `-- BrokenTraceError       the file is damaged past repair (offset given where known)
    |-- UsageError                 the caller asked for something that cannot be done
    |   |-- SessionError           a session used out of order: two at once, steps outside it
    |   |-- TreatmentRefused       a treatment would be wrong on this loop
    |   `-- TrialRefused           a trial of this loop would be wrong or unsafe
    |-- StaleBatchError            a batch is still in use when its slot comes round
    |-- NonFiniteError             training went NaN or infinite (step and parameter named)
    `-- SyncBudgetExceeded         a guarded block synchronised more often than allowed

Each message names the thing, says what was expected and gives the next move.
"""

from __future__ import annotations

INTERRUPTED = 130  # the exit code that a shell reports for a process that SIGINT ended


class PerfDoctorError(Exception):
    """The root: `except PerfDoctorError` catches everything that perfdoctor raises on purpose."""


class CaptureError(PerfDoctorError):
    """A recording cannot be read."""


class NotATraceError(CaptureError):
    """The file holds no recording."""


class UnsupportedTraceError(CaptureError):
    """The file holds a recording of a kind or a version that is not read."""


class BrokenTraceError(CaptureError):
    """The file is damaged so far that nothing sure can be read from it."""


class UsageError(PerfDoctorError):
    """The caller asked for something that cannot be done."""


class SessionError(UsageError):
    """A session was used out of order."""


class TreatmentRefused(UsageError):
    """A treatment would be wrong on this loop; the message says why and what to change."""


class TrialRefused(UsageError):
    """A trial of this loop would be wrong or unsafe; the message says why."""


class StaleBatchError(PerfDoctorError):
    """A batch with a fixed address is still referenced when its memory is to be filled again."""


class NonFiniteError(PerfDoctorError):
    """The loss or a gradient became infinite or NaN."""


class SyncBudgetExceeded(PerfDoctorError):
    """A guarded block synchronised the host with the device more often than its budget allows."""
