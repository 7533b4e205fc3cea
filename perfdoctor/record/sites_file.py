"""`NAME.sites.json`: what a session saw of a loop that Nsight Systems records, kept beside the report.

Nsight Systems knows calls and kernels; the session knows steps, bare step times and the lines that synchronise. The
file is a Capture without device tables, columns as lists of integers. `join` makes one recording of the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from perfdoctor.errors import BrokenTraceError, NotATraceError, UnsupportedTraceError
from perfdoctor.record.capture import Capture, Columns, Environment, Ints, Note, RangeKind, Ranges, from_manifest
from perfdoctor.record.note_codes import WITHOUT_CUDA

SUFFIX = ".sites.json"
_VERSION = 1
_EARLIEST_NS = 10**18  # in 2001: earlier times count from the start of the recording
_MOST_SHIFT_NS = 60 * 10**9  # between two readings of one machine's clock
_MOST_SPREAD_NS = 5 * 10**6  # the ends of a range agree within 1 us, and clocks drift apart by 50 us a second at most
_TID = 0xFFFFFF  # of a globalTid; above it are the process and the machine
T = TypeVar("T", bound=Columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """The session's part of a recording, and what the script ended with.

    `marks` are the ends of the NVTX ranges "step N" on the session's clock, in ns, by N.
    """

    capture: Capture
    marks: dict[int, int]
    exit_code: int = 0


def write_sites(sites: Sites, path: Path) -> None:
    """Write JSON, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    columns: dict[str, list[int]] = {}
    manifest = sites.capture.manifest(lambda name, values: columns.__setitem__(name, values.tolist()))
    document = {
        "sites_version": _VERSION,
        "exit_code": sites.exit_code,
        "marks": [list(mark) for mark in sites.marks.items()],
        "capture": manifest,
        "columns": columns,
    }
    partial = path.with_name(path.name + ".part")
    try:
        partial.write_text(json.dumps(document, allow_nan=False), "utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_sites(path: Path) -> Sites:
    """What `write_sites` wrote.

    Raises:
        NotATraceError: some other JSON.
        UnsupportedTraceError: of another version.
        BrokenTraceError: damaged.
        OSError: it cannot be opened.
    """
    try:
        document: Any = json.loads(path.read_text("utf-8"))
        if not isinstance(document, dict) or "sites_version" not in document:
            raise NotATraceError(f"{path}: no sites file of perfdoctor (it has no sites_version)")
        if document["sites_version"] != _VERSION:
            raise UnsupportedTraceError(
                f"{path}: sites version {document['sites_version']}; this perfdoctor reads {_VERSION}. Record again."
            )
        columns = document["columns"]
        return Sites(
            capture=from_manifest(document["capture"], lambda name: np.array(columns[name], np.int64)),
            marks={int(number): int(end) for number, end in document["marks"]},
            exit_code=int(document["exit_code"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BrokenTraceError(f"{path}: a damaged sites file ({error!r}). Record again.") from error


def join_beside(recording: Capture, path: Path) -> Capture:
    """The recording that was read from `path`, joined with `run.sites.json` where that lies beside `run.sqlite`.

    Raises:
        CaptureError, OSError: the sites file cannot be read.
    """
    beside = path.with_name(path.stem + SUFFIX)
    return join(recording, read_sites(beside)) if beside.is_file() else recording


def join(recording: Capture, sites: Sites) -> Capture:
    """The calls and kernels of `recording` with the steps, lines and bare times of the session, on the session's clock.

    The clocks are laid over each other at the ends of the steps' ranges, which both know: the median over the steps.
    Where they are not of the same run, the recording is given back with a note, without lines.
    """
    session = sites.capture
    # The last of a number: a session that takes batches for steps at first counts from 0 again.
    marked = dict(zip(recording.steps.index.tolist(), recording.steps.end_ns.tolist(), strict=True))
    shifts = sorted(sites.marks[number] - end for number, end in marked.items() if number in sites.marks)
    if problem := _mismatch(recording, shifts):
        text = f"the lines of the sites file beside it could not be joined: {problem}"
        return replace(recording, notes=(*recording.notes, Note(code="not-joined", text=text)))
    moved = _shifted(recording, shifts[len(shifts) // 2])
    offset = len(recording.strings)
    return replace(
        session,
        source="nsys",
        path=recording.path,
        calls=moved.calls,
        work=moved.work,
        ops=moved.ops,
        stream_syncs=moved.stream_syncs,
        ranges=_ranges(moved, session, offset),
        hits=_renamed(session.hits, "kind", offset),
        pauses=_renamed(session.pauses, "name", offset),
        strings=(*recording.strings, *session.strings),
        environment=_filled(session, recording),
        notes=(*_notes(recording, session), *session.notes),
    )


def _mismatch(recording: Capture, shifts: list[int]) -> str:
    """Why the two are not of one run; '' where they are."""
    if not shifts:
        return "no step range of the session is in the recording"
    shift = shifts[len(shifts) // 2]  # np.median would go through floats: 256 ns coarse at Unix time
    if np.median([abs(other - shift) for other in shifts]) > _MOST_SPREAD_NS:
        return "the steps do not lie as in the session; it is of another run"
    if int(recording.steps.end_ns[0]) > _EARLIEST_NS and abs(shift) > _MOST_SHIFT_NS:
        return f"it was written {abs(shift) / 1e9:.0f} s away from the recording, by another run"
    return ""


def _notes(recording: Capture, session: Capture) -> Iterator[Note]:
    """Without those that the session knows better."""
    known = {"no-steps"}
    if any(note.code == WITHOUT_CUDA for note in session.notes):  # it says so itself
        known |= {"no-calls", "no-device-rows"}
    return (note for note in recording.notes if note.code not in known)


def _shifted(recording: Capture, shift_ns: int) -> Capture:
    tables: dict[str, Any] = {}
    for name in ("calls", "work", "ops", "ranges", "stream_syncs"):
        columns = getattr(recording, name).columns()
        for column in ("start_ns", "end_ns"):
            columns[column] = columns[column] + shift_ns
        if "thread" in columns:
            columns["thread"] = columns["thread"] & _TID
        tables[name] = type(getattr(recording, name))(**columns)
    return replace(recording, **tables)


def _ranges(moved: Capture, session: Capture, offset: int) -> Ranges:
    """Those of the recording that the session does not know itself: its steps and phases are the session's."""
    own = _renamed(session.ranges, "name", offset)
    known = {session.text(int(name)) for name in np.unique(session.ranges.name)}
    named = moved.matching(lambda text: text in known)
    kept = ~named[moved.ranges.name] & (moved.ranges.kind != RangeKind.STEP)
    theirs, ours = moved.ranges.columns(), own.columns()
    return Ranges(**{name: np.concatenate((theirs[name][kept], ours[name])) for name in theirs})


def _renamed(table: T, column: str, offset: int) -> T:
    columns: dict[str, Ints] = table.columns()
    columns[column] = np.where(columns[column] >= 0, columns[column] + offset, -1)
    return type(table)(**columns)


def _filled(session: Capture, recording: Capture) -> Environment:
    """The session's environment, and the recording's where the session's is silent."""
    mine, theirs = session.environment, recording.environment
    silent = {f.name: getattr(theirs, f.name) for f in fields(mine) if getattr(mine, f.name) == f.default}
    return replace(mine, **silent)
