"""Every error perfdoctor raises on purpose.

    PerfDoctorError
    |-- CaptureError               a recording cannot be read or is not one
    |   |-- NotATraceError         the file is something else (named, with what to do)
    |   |-- UnsupportedTraceError  a trace of a kind or version that is not read
    |   `-- BrokenTraceError       the file is damaged past repair (offset given where known)
    |-- UsageError                 the caller asked for something that cannot be done
    |   `-- SessionError           a session used out of order: two at once, steps outside it
    `-- SyncBudgetExceeded         a guarded block synchronised more often than allowed

Each message names the thing, says what was expected and gives the next move.
"""

from __future__ import annotations


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


class SyncBudgetExceeded(PerfDoctorError):
    """A guarded block synchronised the host with the device more often than its budget allows."""
