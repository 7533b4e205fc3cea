"""Nsight Systems exports: a small database written here, in the schemas of several years."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from perfdoctor.errors import BrokenTraceError, NotATraceError, UnsupportedTraceError
from perfdoctor.record.capture import CallKind, Capture, CopyKind, HostMemory, RangeKind, WorkKind
from perfdoctor.record.nsys import read_nsys
from perfdoctor.record.summary import summarise

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
    assert note.text.startswith("1 kernel or copy has no end")
