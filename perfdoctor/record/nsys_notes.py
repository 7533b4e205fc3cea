"""What the reader of an Nsight export must know about it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from perfdoctor.record.capture import Capture, Note, WorkKind
from perfdoctor.record.processes import PROCESS, several_processes
from perfdoctor.record.row_notes import row_notes
from perfdoctor.record.sqlite_tables import SqliteTables


def notes_of(capture: Capture, tables: SqliteTables, num_unclosed: int, num_endless: int) -> tuple[Note, ...]:
    """The notes of a capture that is otherwise complete."""
    return (*_notes(capture, tables, num_unclosed), *_endless(num_endless))


def _notes(capture: Capture, tables: SqliteTables, num_unclosed: int) -> Iterator[Note]:
    if holds_environment(tables):
        text = (
            "the export holds the environment variables of the recording machine's processes, which may be secrets: "
            "they were not read; do not share the file"
        )
        yield Note(code="environment-variables", text=text)
    if not len(capture.calls):
        yield Note(code="no-calls", text="no CUDA API calls were recorded: record with -t cuda")
    if not len(capture.work):
        yield Note(code="no-device-rows", text="no kernels or copies were recorded: device time cannot be judged")
    num_graphs = int((capture.work.kind == WorkKind.GRAPH).sum())
    if num_graphs:
        text = (
            f"{num_graphs} CUDA graphs were traced whole: their kernels were not recorded. "
            "Record with --cuda-graph-trace=node to see them."
        )
        yield Note(code="graph-level", text=text, count=num_graphs)
    yield from row_notes(capture)
    if not tables.count("NVTX_EVENTS"):
        yield Note(code="no-nvtx", text="no NVTX ranges were recorded: record with -t cuda,nvtx and mark the steps")
    elif not len(capture.steps):
        yield Note(code="no-steps", text="no NVTX range marks a step (as 'step 12' does)")
    if num_unclosed:
        yield Note(code="unclosed-ranges", text=f"{num_unclosed} NVTX ranges were never closed", count=num_unclosed)
    if not tables.count("StringIds") and len(capture.calls) + len(capture.work):
        text = "the export holds no names (StringIds): what a call or a kernel is, syncs among them, is not known"
        yield Note(code="no-names", text=text)
    processes = np.unique(capture.calls.thread & PROCESS)
    if len(processes) > 1:
        yield several_processes(len(processes))


def _endless(number: int) -> Iterator[Note]:
    if number:
        rows = "row has" if number == 1 else "rows have"
        text = f"{number} {rows} no start or no end: left out, so what looks idle there may not be"
        yield Note(code="skipped-events", text=text, count=number)


def holds_environment(tables: SqliteTables) -> bool:
    """Whether the export holds environment variables."""
    if tables.count("TARGET_INFO_SYSTEM_ENV"):
        return True
    return bool(tables.count("META_DATA_CAPTURE", "WHERE name LIKE '%ENVIRONMENT%'"))
