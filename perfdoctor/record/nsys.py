"""Nsight Systems' SQLite exports (2022 to today) to a Capture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfdoctor.errors import NotATraceError, UnsupportedTraceError
from perfdoctor.record.capture import (
    CallKind,
    Calls,
    Capture,
    CopyKind,
    Environment,
    HostMemory,
    Ranges,
    Spans,
    StreamSyncs,
    Work,
    WorkKind,
)
from perfdoctor.record.correlations import make_unique
from perfdoctor.record.cuda_names import call_kind, strip_suffix
from perfdoctor.record.devices import busiest_device
from perfdoctor.record.duplicates import drop_duplicates, duplicates_note
from perfdoctor.record.nsys_notes import notes_of
from perfdoctor.record.nsys_ranges import read_ranges
from perfdoctor.record.nsys_strings import NsysStrings
from perfdoctor.record.processes import PROCESS
from perfdoctor.record.sqlite_tables import LATEST_NS, SqliteTables, open_tables
from perfdoctor.record.step_ranges import steps_of

Ints = NDArray[np.int64]
Table = dict[str, Ints]

_UNNAMED = -1 & PROCESS
_CUPTI = "CUPTI_ACTIVITY_KIND_"
_TRACED = ("RUNTIME", "KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE", "SYNCHRONIZATION")
# CUPTI's sync types: unknown, event, stream waits for event, stream, context.
_SYNC_TYPES = (
    CallKind.SYNC_DEVICE,
    CallKind.SYNC_EVENT,
    CallKind.STREAM_WAIT,
    CallKind.SYNC_STREAM,
    CallKind.SYNC_DEVICE,
)
_SYNC_KINDS = np.array([int(kind) for kind in _SYNC_TYPES], np.int64)
_N, _H, _D, _DD, _HH, _P = (int(CopyKind[k]) for k in ("NONE", "H2D", "D2H", "D2D", "H2H", "P2P"))
_COPY_KINDS = np.array([_N, _H, _D, _H, _D, _DD, _DD, _DD, _DD, _HH, _P, _H, _D, _DD], np.int64)
_LETTERS = {_H: "HtoD", _D: "DtoH", _DD: "DtoD", _HH: "HtoH", _P: "PtoP"}


def read_nsys(path: Path) -> Capture:
    """Read an export made by `nsys export --type=sqlite`.

    Raises:
        NotATraceError: the database is none of Nsight Systems'.
        UnsupportedTraceError: it is one of nvprof's.
        BrokenTraceError: it is cut off or damaged.
    """
    with open_tables(path) as tables:
        _check_schema(path, tables)
        return _read(path, tables)


def _check_schema(path: Path, tables: SqliteTables) -> None:
    if "StringTable" in tables.names and "StringIds" not in tables.names:
        raise UnsupportedTraceError(
            f"{path}: an nvprof database. nvprof's files are not read; record again with Nsight Systems (nsys profile)."
        )
    known = [name for name in _TRACED if tables.versions(_CUPTI + name)] + tables.versions("NVTX_EVENTS")
    if not known:
        raise NotATraceError(
            f"{path}: an SQLite database without CUDA or NVTX tables of Nsight Systems. "
            "Expected what `nsys export --type=sqlite REPORT.nsys-rep` writes, recorded with -t cuda,nvtx."
        )


def _read(path: Path, tables: SqliteTables) -> Capture:
    strings = NsysStrings(tables)
    calls, num_endless_calls = _without_endless(_read_calls(tables, strings))
    work, num_endless = _without_endless(_read_work(tables, strings))
    syncs, _ = _without_endless(_read_syncs(tables))  # the same calls once more
    _name_processes(calls, work, syncs)
    work["device"] = _gpus(tables, work)
    rows = {"calls": calls, "work": work, "syncs": syncs}
    num_twice = drop_duplicates(rows)
    calls, work, syncs = rows["calls"], rows["work"], rows["syncs"]
    _separate_processes(calls, work, syncs)
    make_unique(calls, work, syncs)
    last = max((int(t["end_ns"].max()) for t in (calls, work, syncs) if len(t["end_ns"])), default=0)
    ranges, ops, numbers, unfinished, num_unplaced = read_ranges(tables, strings, last)
    base = _clock_base_ns(tables)
    for table in (calls, work, syncs, ranges, ops):
        table["start_ns"] = table["start_ns"] + base
        table["end_ns"] = table["end_ns"] + base
    range_table = Ranges.of(ranges)
    capture = Capture(
        source="nsys",
        calls=Calls.of(calls),
        work=Work.of(work),
        ops=Spans.of(ops),
        ranges=range_table,
        stream_syncs=StreamSyncs.of(syncs),
        steps=steps_of(range_table, numbers, unfinished),
        strings=tuple(strings.strings),
        environment=_environment(tables, work),
        path=str(path),
    )
    notes = notes_of(capture, tables, int(unfinished.sum()), num_endless + num_endless_calls + num_unplaced)
    return replace(capture, notes=(*notes, duplicates_note(num_twice)) if num_twice else notes)


def _read_calls(tables: SqliteTables, strings: NsysStrings) -> Table:
    raw = tables.integers(_CUPTI + "RUNTIME", ("start", "end", "globalTid", "correlationId", "nameId"))
    name = strings.names(raw["nameId"], strip_suffix)
    kinds = np.array([int(call_kind(text)) for text in strings.strings], np.int64)
    return {
        "start_ns": raw["start"],
        "end_ns": raw["end"],
        "thread": raw["globalTid"],
        "name": name,
        "kind": kinds[name],
        "correlation": raw["correlationId"],
        "process": raw["globalTid"] & PROCESS,
    }


def _read_work(tables: SqliteTables, strings: NsysStrings) -> Table:
    kernels = _kernels(tables, strings)
    graphs = _rows(tables, "GRAPH_TRACE", WorkKind.GRAPH)
    # A graph whose nodes were recorded too would count twice.
    alone = ~np.isin(graphs["correlation"], kernels["correlation"])
    graphs = {column: values[alone] for column, values in graphs.items()}
    graphs["name"] = np.full(len(graphs["start_ns"]), strings.table["CUDA graph"] if alone.any() else 0, np.int64)
    parts = (kernels, _copies(tables, strings), _sets(tables, strings), graphs)
    return {column: np.concatenate([part[column] for part in parts]) for column in kernels}


def _without_endless(table: Table) -> tuple[Table, int]:
    """Rows whose end is not before their start, and how many are left out: NULL, or cut by the end of the session."""
    start, end = table["start_ns"], table["end_ns"]
    whole = (start > -LATEST_NS) & (end >= start) & (end < LATEST_NS)
    return {column: values[whole] for column, values in table.items()}, int((~whole).sum())


def _rows(tables: SqliteTables, table: str, kind: WorkKind, extra: tuple[str, ...] = ()) -> Table:
    raw = tables.integers(
        _CUPTI + table, ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", *extra)
    )
    blank = np.full(len(raw["start"]), -1, np.int64)
    return {
        "start_ns": raw["start"],
        "end_ns": raw["end"],
        "device": raw["deviceId"],
        "stream": raw["streamId"],
        "kind": np.full(len(blank), int(kind), np.int64),
        "correlation": raw["correlationId"],
        "num_bytes": blank,
        "copy": np.zeros(len(blank), np.int64),
        "memory": np.zeros(len(blank), np.int64),
        "blocks": blank,
        "process": raw["globalPid"] & PROCESS,
        **{column: raw[column] for column in extra},
    }


def _kernels(tables: SqliteTables, strings: NsysStrings) -> Table:
    names = ("demangledName", "shortName", "mangledName")
    rows = _rows(tables, "KERNEL", WorkKind.KERNEL, (*names, "gridX", "gridY", "gridZ"))
    grid = [rows.pop(axis) for axis in ("gridX", "gridY", "gridZ")]
    blocks = np.where(grid[0] > 0, grid[0] * np.maximum(grid[1], 1) * np.maximum(grid[2], 1), -1)
    ids = [rows.pop(name) for name in names]
    chosen = np.where(ids[0] >= 0, ids[0], np.where(ids[1] >= 0, ids[1], ids[2]))
    return {**rows, "blocks": blocks, "name": strings.names(chosen)}


def _copies(tables: SqliteTables, strings: NsysStrings) -> Table:
    rows = _rows(tables, "MEMCPY", WorkKind.MEMCPY, ("bytes", "copyKind", "srcKind", "dstKind"))
    number, size, source, target = (rows.pop(c) for c in ("copyKind", "bytes", "srcKind", "dstKind"))
    copy = _COPY_KINDS[np.where((number >= 0) & (number < len(_COPY_KINDS)), number, 0)]
    host = np.where(np.isin(copy, (_D, _P)), target, source)
    host = np.where((copy == _HH) & (target == 0), 0, host)  # one pageable side is enough to block
    memory = np.where(copy == _DD, 0, np.select([host == 0, host == 1], [HostMemory.PAGEABLE, HostMemory.PINNED], 0))
    name = np.zeros(len(copy), np.int64)
    for kind in np.unique(copy).tolist():
        name[copy == kind] = strings.table[f"Memcpy {_LETTERS.get(kind, 'Unknown')}"]
    return {**rows, "num_bytes": size, "copy": copy, "memory": memory.astype(np.int64), "name": name}


def _sets(tables: SqliteTables, strings: NsysStrings) -> Table:
    rows = _rows(tables, "MEMSET", WorkKind.MEMSET, ("bytes",))
    size = rows.pop("bytes")
    name = np.full(len(size), strings.table["Memset"] if len(size) else 0, np.int64)
    return {**rows, "num_bytes": size, "name": name}


def _read_syncs(tables: SqliteTables) -> Table:
    columns = ("start", "end", "streamId", "correlationId", "globalPid", "syncType", "eventSyncId")
    raw = tables.integers(_CUPTI + "SYNCHRONIZATION", columns)
    kind = _SYNC_KINDS[np.where((raw["syncType"] >= 0) & (raw["syncType"] < len(_SYNC_KINDS)), raw["syncType"], 0)]
    return {
        "start_ns": raw["start"],
        "end_ns": raw["end"],
        "kind": kind,
        "stream": np.where((raw["streamId"] >= 1 << 31) | (kind == CallKind.SYNC_DEVICE), -1, raw["streamId"]),
        "correlation": raw["correlationId"],
        "record_correlation": _record_correlations(tables, raw),
        "process": raw["globalPid"] & PROCESS,
    }


def _record_correlations(tables: SqliteTables, syncs: Table) -> Ints:
    """The cudaEventRecord that each event sync waited for, where the export tells (from 2025 on)."""
    records = tables.integers(_CUPTI + "CUDA_EVENT", ("eventSyncId", "correlationId", "globalPid"))
    processes = (records["globalPid"] & PROCESS).tolist()
    events = zip(processes, records["eventSyncId"].tolist(), records["correlationId"].tolist(), strict=True)
    known = {(process, event): correlation for process, event, correlation in events if event >= 0}
    keys = zip((syncs["globalPid"] & PROCESS).tolist(), syncs["eventSyncId"].tolist(), strict=True)
    return np.array([known.get(key, -1) for key in keys], np.int64)


def _name_processes(*tables: Table) -> None:
    """Rows whose process the export does not give are those of the only process that others name."""
    named = np.unique(np.concatenate([table["process"] for table in tables]))
    named = named[named != _UNNAMED]
    if len(named) == 1:
        for table in tables:
            table["process"] = np.full(len(table["process"]), named[0], np.int64)


def _gpus(tables: SqliteTables, work: Table) -> Ints:
    """The GPU of each row. Where every process sees a GPU of its own, all of them call it device 0."""
    rows = tables.integers("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid"))
    keys = zip(rows["pid"].tolist(), rows["cudaId"].tolist(), rows["gpuId"].tolist(), strict=True)
    known = {(pid, device): gpu for pid, device, gpu in keys if gpu >= 0}
    pids = (work["process"] >> 24 & 0xFFFFFF).tolist()
    return np.array([known.get(key, key[1]) for key in zip(pids, work["device"].tolist(), strict=True)], np.int64)


def _separate_processes(*tables: Table) -> None:
    """Correlations count from one in every process: give each process its own range of them."""
    processes = np.unique(np.concatenate([table["process"] for table in tables]))
    for table in tables:
        offset = np.searchsorted(processes, table["process"]) << 40
        for column in ("correlation", "record_correlation"):
            if column in table:
                table[column] = np.where(table[column] > 0, table[column] + offset, -1)


def _clock_base_ns(tables: SqliteTables) -> int:
    """Unix time of the session's start, where the export gives it: else times count from that start."""
    base = tables.integers("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",))["utcEpochNs"]
    return int(base[0]) if len(base) and 0 <= base[0] < LATEST_NS else 0


def _environment(tables: SqliteTables, work: Table) -> Environment:
    """The GPU that did most of the work. The export's environment variables are never read."""
    devices, names = work["device"], tables.versions("TARGET_INFO_GPU")
    wanted = ("name", "totalMemory", "computeMajor", "computeMinor")
    if not names or not tables.columns_of(names[0]).issuperset(("id", *wanted)):
        return Environment(num_gpus=len(np.unique(devices)))
    rows = tables.rows(f'SELECT id, {", ".join(wanted)} FROM "{names[0]}" ORDER BY id')
    busiest = busiest_device(devices, work["start_ns"], work["end_ns"])
    chosen = next((row for row in rows if row[0] == busiest), rows[0] if rows else None)
    if chosen is None:
        return Environment(num_gpus=len(np.unique(devices)))
    _, name, memory, major, minor = chosen
    return Environment(
        gpu=str(name or ""),
        num_gpus=len(rows),
        memory_bytes=memory if isinstance(memory, int) else None,
        compute_capability=f"{major}.{minor}" if major is not None else "",
    )
