"""From trace files to a report, on any machine: no torch is imported on this way."""

from __future__ import annotations

import os

from perfdoctor.diagnose import diagnose, diagnose_ranks
from perfdoctor.errors import UsageError
from perfdoctor.record.load import load_capture
from perfdoctor.record.script_note import noted_script
from perfdoctor.report.page import Report


def analyze(*paths: str | os.PathLike[str]) -> Report:
    """Read recordings and say what they lose, and where. Several files are the ranks of one run.

    A file may be a torch.profiler trace (.json, .json.gz), an Nsight Systems export (.sqlite, or a .nsys-rep where
    `nsys` is on PATH) or a saved Capture; what it is is told from its content.

    Raises:
        UsageError: no file was named.
        CaptureError: a file is not a recording, of an unread kind, or damaged.
        OSError: a file cannot be opened.
    """
    if not paths:
        raise UsageError("analyze() got no file: name a trace (torch.profiler JSON, nsys SQLite or a saved capture)")
    captures = [load_capture(path) for path in paths]
    found = diagnose(captures[0]) if len(captures) == 1 else diagnose_ranks(captures)
    return Report.of(found, captures, script=noted_script(captures[0].notes))
