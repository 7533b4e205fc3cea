"""Nsight Systems exports: a small database written here, in the schemas of several years."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from perfdoctor.errors import BrokenTraceError, NotATraceError, UnsupportedTraceError
from perfdoctor.record.capture import CallKind, Capture, CopyKind, HostMemory, RangeKind, WorkKind
from perfdoctor.record.nsys import read_nsys
from perfdoctor.record.summary import summarise
from perfdoctor.record.timeline import Timeline

PROCESS = 1 << 24
THREAD = PROCESS + 7
NAMES = [
    "cudaLaunchKernel_v7000", "cudaMemcpyAsync_v3020_ptsz", "cudaStreamSynchronize_v3020", "void gemm<float>(float*)",
    "step 3", "step 4", "data", "cudaGraphLaunch_v10000", "gemm", "aten::mul, seq = 12, op_id = 34, sizes = [[2, 2]]",
    "cudaEventRecord_v3020", "SECRET_TOKEN=hunter2",
]  # fmt: skip


class Export:
    """Writes tables of an export; `id_of` gives the StringIds id of a name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tables: dict[str, tuple[str, list[tuple[object, ...]]]] = {}
        self.add("StringIds", "id INTEGER PRIMARY KEY, value TEXT", *enumerate(NAMES, 1))

    def add(self, table: str, columns: str, *rows: tuple[object, ...]) -> None:
        self.tables[table] = (columns, list(rows))

    def read(self) -> Capture:
        self.path.unlink(missing_ok=True)
        with sqlite3.connect(self.path) as database:
            for table, (columns, rows) in self.tables.items():
                database.execute(f"CREATE TABLE {table} ({columns})")
                for row in rows:
                    database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        database.close()
        return read_nsys(self.path)


def id_of(name: str) -> int:
    return 1 + next(i for i, text in enumerate(NAMES) if text.startswith(name))


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Two steps of 100: launch, kernel of 30, pageable copy of 5 after a gap of 10, a sync of 20."""
    made = Export(tmp_path / "report.sqlite")
    calls, kernels, copies = [], [], []
    for at, first in ((0, 10), (100, 20)):
        calls += [
            (at + 1, at + 3, THREAD, first, id_of("cudaLaunchKernel")),
            (at + 4, at + 6, THREAD, first + 1, id_of("cudaMemcpyAsync")),
            (at + 7, at + 27, THREAD, first + 2, id_of("cudaStreamSynchronize")),
        ]
        kernels.append((at + 10, at + 40, 0, 7, first, PROCESS, id_of("void gemm"), id_of("gemm"), 4, 2, 1))
        copies.append((at + 50, at + 55, 0, 7, first + 1, PROCESS, 4096, 1, 0, 2))
    made.add("CUPTI_ACTIVITY_KIND_RUNTIME", "start INT, end INT, globalTid INT, correlationId INT, nameId INT", *calls)
    row = "start INT, end INT, deviceId INT, streamId INT, correlationId INT, globalPid INT, "
    made.add(
        "CUPTI_ACTIVITY_KIND_KERNEL",
        row + "demangledName INT, shortName INT, gridX INT, gridY INT, gridZ INT",
        *kernels,
    )
    made.add("CUPTI_ACTIVITY_KIND_MEMCPY", row + "bytes INT, copyKind INT, srcKind INT, dstKind INT", *copies)
    nvtx = [(0, 100, 59, THREAD, id_of("step 3"), None), (100, 200, 59, THREAD, id_of("step 4"), None)]
    nvtx += [(0, 5, 59, THREAD, id_of("data"), None), (2, 3, 34, THREAD, id_of("data"), None)]
    made.add("NVTX_EVENTS", "start INT, end INT, eventType INT, globalTid INT, textId INT, text TEXT", *nvtx)
    return made


def codes(capture: Capture) -> list[str]:
    return [note.code for note in capture.notes]


def test_every_table(export: Export) -> None:
    capture = export.read()
    assert [capture.text(int(i)) for i in capture.calls.name[:3]] == [
        "cudaLaunchKernel",
        "cudaMemcpyAsync",
        "cudaStreamSynchronize",
    ]
    assert capture.calls.kind.tolist() == [CallKind.LAUNCH, CallKind.MEMCPY, CallKind.SYNC_STREAM] * 2
    assert set(capture.calls.thread.tolist()) == {THREAD}
    copies = capture.work.take(capture.work.kind == WorkKind.MEMCPY)
    assert copies.copy.tolist() == [CopyKind.H2D] * 2
    assert copies.memory.tolist() == [HostMemory.PAGEABLE] * 2
    assert copies.num_bytes.tolist() == [4096] * 2
    kernels = capture.work.take(capture.work.kind == WorkKind.KERNEL)
    assert kernels.blocks.tolist() == [8, 8]
    assert capture.text(int(kernels.name[0])) == "void gemm<float>(float*)"
    assert kernels.correlation.tolist() == capture.calls.correlation[[0, 3]].tolist()
    assert capture.steps.index.tolist() == [3, 4]
    assert sorted(capture.ranges.kind.tolist()) == [RangeKind.STEP, RangeKind.STEP, RangeKind.PHASE]
    assert capture.notes == ()


def test_figures(export: Export) -> None:
    found = summarise(export.read())
    wanted = {
        "gpu_busy_us": 0.07,
        "gpu_span_us": 0.145,
        "largest_gap_us": 0.055,
        "syncs": 2,
        "sync_wait_us": 0.04,
        "steps": 2,
    }
    assert {key: found[key] for key in wanted} == wanted


def test_text_inline_and_no_text_ids(export: Export) -> None:
    rows = [(0, 100, 59, THREAD, "iteration 8"), (100, None, 59, THREAD, "iteration 9")]
    export.add("NVTX_EVENTS", "start INT, end INT, eventType INT, globalTid INT, text TEXT", *rows)
    capture = export.read()
    assert capture.steps.index.tolist() == [8, 9]
    assert capture.steps.complete.tolist() == [1, 0]
    assert capture.steps.end_ns.tolist() == [100, 155]  # a range never closed ends with the recording
    assert codes(capture) == ["unclosed-ranges"]


def test_versioned_tables_and_missing_ones(export: Export) -> None:
    export.tables["CUPTI_ACTIVITY_KIND_KERNEL_V3"] = export.tables.pop("CUPTI_ACTIVITY_KIND_KERNEL")
    del export.tables["NVTX_EVENTS"]
    capture = export.read()
    assert summarise(capture)["kernels"] == 2
    assert codes(capture) == ["no-nvtx"]


def test_graphs_traced_whole(export: Export) -> None:
    row = "start INT, end INT, deviceId INT, streamId INT, correlationId INT, globalPid INT"
    del export.tables["CUPTI_ACTIVITY_KIND_KERNEL"]
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", row, (10, 40, 0, 7, 10, PROCESS))
    capture = export.read()
    assert summarise(capture)["kernels"] is None
    assert summarise(capture)["gpu_busy_us"] == 0.04
    assert codes(capture) == ["graph-level"]


def test_graph_beside_its_nodes_counts_once(export: Export) -> None:
    row = "start INT, end INT, deviceId INT, streamId INT, correlationId INT, globalPid INT"
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", row, (5, 45, 0, 7, 10, PROCESS))
    assert WorkKind.GRAPH not in export.read().work.kind


def test_ops_of_emit_nvtx(export: Export) -> None:
    row = (20, 30, 59, THREAD, id_of("aten::mul"), None)
    export.add("NVTX_EVENTS", "start INT, end INT, eventType INT, globalTid INT, textId INT, text TEXT", row)
    capture = export.read()
    assert [capture.text(int(i)) for i in capture.ops.name] == ["aten::mul"]
    assert len(capture.ranges) == 0


def test_processes_have_correlations_of_their_own(export: Export) -> None:
    columns, calls = export.tables["CUPTI_ACTIVITY_KIND_RUNTIME"]
    others = [(start, end, (2 << 24) + 7, *rest) for start, end, _, *rest in calls]
    export.add("CUPTI_ACTIVITY_KIND_RUNTIME", columns, *calls, *others)
    capture = export.read()
    assert len(set(capture.calls.correlation.tolist())) == 12
    assert set(capture.work.correlation.tolist()) <= set(capture.calls.correlation[:6].tolist())
    assert codes(capture) == ["several-processes"]


def test_event_sync_names_its_record(export: Export) -> None:
    columns = "start INT, end INT, streamId INT, correlationId INT, globalPid INT, syncType INT, eventSyncId INT"
    export.add(
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        columns,
        (7, 27, 4294967295, 12, PROCESS, 1, 5),
        (8, 9, 7, 13, PROCESS, 3, -1),
    )
    export.add("CUPTI_ACTIVITY_KIND_CUDA_EVENT", "eventSyncId INT, correlationId INT, globalPid INT", (5, 11, PROCESS))
    syncs = export.read().stream_syncs
    assert syncs.kind.tolist() == [CallKind.SYNC_EVENT, CallKind.SYNC_STREAM]
    assert syncs.stream.tolist() == [-1, 7]
    assert syncs.record_correlation.tolist() == [11, -1]


def test_environment_variables_stay_out(export: Export) -> None:
    export.add(
        "TARGET_INFO_SYSTEM_ENV",
        "globalVid INT, devStateName TEXT, name TEXT, nameEnum INT, value TEXT",
        (1, "a", "TOKEN", 1, "hunter2"),
    )
    capture = export.read()
    assert not any("hunter2" in text for text in capture.strings)
    assert codes(capture) == ["environment-variables"]
    del export.tables["TARGET_INFO_SYSTEM_ENV"]
    export.add("META_DATA_CAPTURE", "name TEXT, value TEXT", ("PROCESS_0:ENVIRONMENT_VARIABLE", "TOKEN=hunter2"))
    assert codes(export.read()) == ["environment-variables"]


def test_gpu_and_clock(export: Export) -> None:
    export.add(
        "TARGET_INFO_GPU",
        "id INT, name TEXT, totalMemory INT, computeMajor INT, computeMinor INT",
        (0, "H200", 150, 9, 0),
    )
    export.add("TARGET_INFO_SESSION_START_TIME", "utcEpochNs INT", (1_700_000_000_000_000_000,))
    capture = export.read()
    assert (capture.environment.gpu, capture.environment.memory_bytes, capture.environment.compute_capability) == (
        "H200",
        150,
        "9.0",
    )
    assert capture.calls.start_ns[0] == 1_700_000_000_000_000_001
    assert capture.steps.start_ns[0] == 1_700_000_000_000_000_000


def test_wrong_databases(export: Export, tmp_path: Path) -> None:
    export.read()
    whole = export.path.read_bytes()
    export.path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BrokenTraceError, match=r"report\.sqlite.*nsys export|cut off"):
        read_nsys(export.path)
    other = Export(tmp_path / "other.sqlite")
    with pytest.raises(NotATraceError, match="nsys export"):
        other.read()
    other.tables = {"StringTable": ("_id_ INT, value TEXT", []), "CUPTI_ACTIVITY_KIND_RUNTIME": ("start INT", [])}
    with pytest.raises(UnsupportedTraceError, match="nvprof"):
        other.read()


def test_text_where_numbers_belong(export: Export) -> None:
    export.add("CUPTI_ACTIVITY_KIND_RUNTIME", "start TEXT, end INT, globalTid INT", ("soon", 2, 3))
    with pytest.raises(BrokenTraceError, match="no number"):
        export.read()


def test_reading_writes_nothing(export: Export, tmp_path: Path) -> None:
    export.read()
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    read_nsys(export.path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_journal_beside_the_export_is_taken_in(export: Export, tmp_path: Path, mode: str) -> None:
    """What a program that still has the export open wrote last is in `-wal`; what it did not end is undone."""
    export.read()
    folder = tmp_path / "taken while it was open"
    folder.mkdir()
    with sqlite3.connect(export.path) as database:
        database.execute(f"PRAGMA journal_mode={mode}")
        database.execute("PRAGMA cache_size=1")
        database.execute("PRAGMA cache_spill=1")
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = end + 5 WHERE start < 100")
        if mode == "wal":
            database.commit()
        else:  # pages are in the file before the end of the transaction
            database.execute("CREATE TABLE more (x)")
            database.executemany("INSERT INTO more VALUES (?)", [("x" * 3000,) for _ in range(200)])
        for file in tmp_path.glob("report.sqlite*"):
            (folder / file.name).write_bytes(file.read_bytes())
        database.rollback()
    database.close()
    assert len(list(folder.iterdir())) > 1
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert summarise(read_nsys(folder / "report.sqlite"))["gpu_busy_us"] == (0.075 if mode == "wal" else 0.07)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("table", ["KERNEL", "MEMCPY", "RUNTIME"])
@pytest.mark.parametrize(("column", "value"), [("start INT", None), ("end INT", None), ("end INT", 0)])
def test_rows_without_a_time_are_left_out_and_counted(export: Export, table: str, column: str, value: object) -> None:
    columns, rows = export.tables[f"CUPTI_ACTIVITY_KIND_{table}"]
    place = columns.split(", ").index(column)
    last = list(rows[-1])
    last[place] = value
    export.tables[f"CUPTI_ACTIVITY_KIND_{table}"] = (columns, [*rows[:-1], tuple(last)])
    capture = export.read()
    assert len(capture.calls) + len(capture.work) == 9
    assert [note.count for note in capture.notes if note.code == "skipped-events"] == [1]


@pytest.mark.parametrize("start", [None, 2**62, -(2**63)])
def test_ranges_without_a_start_are_left_out_and_counted(export: Export, start: int | None) -> None:
    columns, rows = export.tables["NVTX_EVENTS"]
    export.add("NVTX_EVENTS", columns, (start, 50, 59, THREAD, id_of("step 3"), None), *rows)
    capture = export.read()
    assert capture.steps.start_ns.tolist() == [0, 100]
    assert [(note.code, note.count) for note in capture.notes] == [("skipped-events", 1)]


@pytest.mark.parametrize("end", [None, 50, 2**63 - 1, -(2**63)])
def test_a_range_whose_end_is_none_was_never_closed(export: Export, end: int | None) -> None:
    columns, rows = export.tables["NVTX_EVENTS"]
    export.add("NVTX_EVENTS", columns, *rows, (150, end, 59, THREAD, id_of("step 4"), None))
    capture = export.read()
    assert capture.steps.end_ns.tolist() == [100, 200, 155]  # with the last device work
    assert capture.steps.complete.tolist() == [1, 1, 0]
    assert codes(capture) == ["unclosed-ranges"]


@pytest.mark.parametrize("base", [2**63 - 1, 2**61, -5, None])
def test_a_clock_that_leaves_no_room_is_not_used(export: Export, base: int | None) -> None:
    export.add("TARGET_INFO_SESSION_START_TIME", "utcEpochNs INT", (base,))
    assert export.read().steps.start_ns.tolist() == [0, 100]


def test_times_before_the_session_began_are_times(export: Export) -> None:
    whole = summarise(export.read())
    for name, (columns, rows) in list(export.tables.items()):
        if columns.startswith("start INT, end INT"):
            export.tables[name] = (columns, [(start - 60, end - 60, *rest) for start, end, *rest in rows])
    capture = export.read()
    assert summarise(capture) == whole
    assert capture.steps.start_ns.tolist() == [-60, 40]
    assert codes(capture) == []


def test_a_table_beside_its_newer_version_counts_once(export: Export) -> None:
    whole = summarise(export.read())
    for table in ("KERNEL", "MEMCPY", "RUNTIME"):
        columns, rows = export.tables[f"CUPTI_ACTIVITY_KIND_{table}"]
        export.add(f"CUPTI_ACTIVITY_KIND_{table}_V2", columns, *rows)
    capture = export.read()
    assert summarise(capture) == whole
    assert {note.code: note.count for note in capture.notes} == {"duplicate-rows": 10}


def test_start_end_ranges_are_of_the_process(export: Export) -> None:
    """They may begin on any thread: three steps of three threads."""
    rows = [(at, at + 60, 60, THREAD + i, id_of("step 3"), None) for i, at in enumerate((0, 60, 120))]
    export.add("NVTX_EVENTS", "start INT, end INT, eventType INT, globalTid INT, textId INT, text TEXT", *rows)
    assert export.read().steps.start_ns.tolist() == [0, 60, 120]
    pushed = [(*row[:2], 59, *row[3:]) for row in rows]
    export.add("NVTX_EVENTS", "start INT, end INT, eventType INT, globalTid INT, textId INT, text TEXT", *pushed)
    assert len(export.read().steps) == 1


def second_process(export: Export) -> None:
    """The same calls, kernels and copies of another process, 13 ns later, on a device that it also calls 0."""
    for name, at in (("RUNTIME", 2), ("KERNEL", 5), ("MEMCPY", 5)):
        columns, rows = export.tables[f"CUPTI_ACTIVITY_KIND_{name}"]
        moved = [[start + 13, end + 13, *rest] for start, end, *rest in rows]
        for row in moved:
            row[at] = (2 << 24) + (row[at] & 0xFFFFFF)  # type: ignore[operator]
        export.add(f"CUPTI_ACTIVITY_KIND_{name}", columns, *rows, *(tuple(row) for row in moved))


def test_a_page_is_of_the_process_whose_steps_are_marked(export: Export) -> None:
    alone = Timeline(export.read())
    second_process(export)
    capture = export.read()
    line = Timeline(capture)
    assert codes(capture) == ["several-processes"]
    assert (len(capture.calls), len(capture.work)) == (12, 8)
    assert line.calls.start_ns.tolist() == alone.calls.start_ns.tolist()
    assert line.work.start_ns.tolist() == alone.work.start_ns.tolist()
    assert line.call_of_work.tolist() == alone.call_of_work.tolist()


def test_processes_that_call_their_own_gpu_device_0(export: Export) -> None:
    second_process(export)
    assert summarise(export.read())["devices"].keys() == {0}
    export.add("TARGET_INFO_CUDA_DEVICE", "gpuId INT, cudaId INT, pid INT", (4, 0, 1), (6, 0, 2))
    export.add("TARGET_INFO_GPU", "id INT, name TEXT, totalMemory INT, computeMajor INT, computeMinor INT",
               (4, "four", 1, 9, 0), (6, "six", 1, 9, 0))  # fmt: skip
    capture = export.read()
    figures = summarise(capture)["devices"]
    assert figures.keys() == {4, 6}
    assert figures[4] == figures[6]
    assert figures[4]["gpu_busy_us"] == 0.07
    assert capture.environment.gpu == "four"


def test_rows_that_name_no_process_are_of_the_only_one(export: Export) -> None:
    for table in ("KERNEL", "MEMCPY"):
        columns, rows = export.tables[f"CUPTI_ACTIVITY_KIND_{table}"]
        place = columns.split(", ").index("globalPid INT")
        kept = [(*row[:place], *row[place + 1 :]) for row in rows]
        export.add(f"CUPTI_ACTIVITY_KIND_{table}", columns.replace("globalPid INT, ", ""), *kept)
    capture = export.read()
    assert (Timeline(capture).call_of_work >= 0).all()
    assert codes(capture) == []


def test_an_export_without_names_says_so(export: Export) -> None:
    del export.tables["StringIds"]
    assert {"no-names", "no-steps"} <= set(codes(export.read()))


def test_kernels_without_an_end_are_left_out_and_counted(export: Export) -> None:
    columns, rows = export.tables["CUPTI_ACTIVITY_KIND_KERNEL"]
    place = columns.split(", ").index("end INT")
    first = list(rows[0])
    first[place] = None
    export.tables["CUPTI_ACTIVITY_KIND_KERNEL"] = (columns, [tuple(first), *rows[1:]])
    capture = export.read()
    assert int((capture.work.kind == WorkKind.KERNEL).sum()) == 1  # of two
    (note,) = capture.notes
    assert note.code == "skipped-events"
    assert note.text.startswith("1 row has no start or no end")
