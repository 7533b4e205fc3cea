"""Kineto traces: every column, the clock, the links, the formats that people have."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_rows import document, kernel, launch, row, two_steps

from perfdoctor.record.capture import CallKind, Capture, CopyKind, HostMemory, RangeKind, WorkKind
from perfdoctor.record.kineto import read_kineto
from perfdoctor.record.summary import summarise


def read(folder: Path, content: Any) -> Capture:
    path = folder / "trace.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_kineto(path)


def test_every_table_of_a_small_trace(tmp_path: Path) -> None:
    capture = read(tmp_path, document(two_steps(), baseTimeNanoseconds=1_700_000_000_000_000_000))
    assert [len(getattr(capture, table)) for table in ("calls", "work", "ops", "frames", "ranges", "steps")] == [
        6,
        4,
        2,
        2,
        2,
        2,
    ]
    assert capture.calls.start_ns[0] == 1_700_000_000_000_003_000
    assert capture.calls.kind.tolist() == [CallKind.LAUNCH, CallKind.MEMCPY, CallKind.SYNC_STREAM] * 2
    assert capture.calls.correlation.tolist() == [50, 51, 52, 60, 61, 62]
    assert sorted(capture.work.kind.tolist()) == [WorkKind.KERNEL] * 2 + [WorkKind.MEMCPY] * 2
    copies = capture.work.take(capture.work.kind == WorkKind.MEMCPY)
    assert copies.copy.tolist() == [CopyKind.D2H] * 2
    assert copies.memory.tolist() == [HostMemory.PINNED] * 2
    assert copies.num_bytes.tolist() == [4, 4]
    assert capture.work.take(capture.work.kind == WorkKind.KERNEL).blocks.tolist() == [8, 8]
    assert capture.text(int(capture.frames.name[0])) == "train.py(3): step"
    assert capture.steps.index.tolist() == [5, 6]
    assert (capture.steps.end_ns - capture.steps.start_ns).tolist() == [100_000, 100_000]
    assert capture.path == str(tmp_path / "trace.json")
    assert capture.notes == ()


def test_figures_of_a_small_trace(tmp_path: Path) -> None:
    found = summarise(read(tmp_path, document(two_steps())))
    wanted = {
        "kernels": 2,
        "memcpys": 2,
        "gpu_busy_us": 64,
        "gpu_span_us": 142,
        "gpu_idle_us": 78,
        "largest_gap_us": 58,
    }
    assert {key: found[key] for key in wanted} == wanted
    assert (found["syncs"], found["sync_wait_us"], found["steps"]) == (2, 80.0, 2)


@pytest.mark.parametrize("indent", [None, 0, 1, 2, 8])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n\t", "  :  ")])
@pytest.mark.parametrize("first", ["ph", "name", "args"])
def test_layout_does_not_matter(tmp_path: Path, indent: int | None, separators: tuple[str, str], first: str) -> None:
    rows = [{first: event[first], **event} for event in two_steps()]
    capture = read(tmp_path, json.dumps(document(rows), indent=indent, separators=separators))
    assert summarise(capture) == summarise(read(tmp_path, document(two_steps())))
    assert capture.notes == ()


def test_bare_list_and_gzip_members(tmp_path: Path) -> None:
    text = json.dumps(two_steps()).encode()
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(text[:500]) + gzip.compress(text[500:]) + b"\0" * 512)
    assert summarise(read_kineto(path))["gpu_busy_us"] == 64
    assert read_kineto(path).notes == ()


def test_blocks_are_cut_between_events(tmp_path: Path) -> None:
    """The file is several blocks long; names hold what looks like a boundary between events."""
    rows = []
    for step in range(4000):
        trap = 'x }, {"ph": "X" } ] , { "name" '
        rows += [kernel(10.0 * step, 5.0, step + 1, name=trap), row("cpu_op", "a" * 300, 10.0 * step, 1.0)]
    capture = read(tmp_path, document(rows))
    assert (len(capture.work), len(capture.ops)) == (4000, 4000)
    assert summarise(capture)["gpu_busy_us"] == 20_000
    assert capture.text(int(capture.work.name[0])).startswith("x }, {")
    assert not any(note.code.startswith(("repaired", "skipped", "trunc")) for note in capture.notes)


def test_footer_larger_than_a_block(tmp_path: Path) -> None:
    content = document(two_steps()) | {"stackFrames": {str(i): {"name": "f" * 100} for i in range(20_000)}}
    content |= {"baseTimeNanoseconds": 5_000}
    assert read(tmp_path, content).calls.start_ns[0] == 8_000


@pytest.mark.parametrize(
    ("ts", "dur", "base"),
    [
        ("5147138327020.639", "0.001", 1_790_857_026_000_000_000),
        ("1712345678901234.567", "12.345", 0),  # Unix time with a fraction: a float64 would be off by up to 125 ns
        ("1623142623460111", "25", 0),
        ("0.0", "1000.0", 7),
        ("12345.6789", "1e3", 0),
    ],
)
def test_times_are_exact(tmp_path: Path, ts: str, dur: str, base: int) -> None:
    event = f'{{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 2, "ts": {ts}, "dur": {dur}}}'
    capture = read(tmp_path, f'{{"traceEvents": [{event}, {event}], "baseTimeNanoseconds": {base}}}')
    assert capture.ops.start_ns.tolist() == [base + round(Decimal(ts) * 1000)] * 2
    assert (capture.ops.end_ns - capture.ops.start_ns).tolist() == [round(Decimal(dur) * 1000)] * 2


def test_times_are_exact_beside_a_damaged_event(tmp_path: Path) -> None:
    good = '{"ph": "X", "cat": "cpu_op", "name": "a", "tid": 2, "ts": 1712345678901234.567, "dur": 1.5}'
    capture = read(tmp_path, f'{{"traceEvents": [{good}, {{"ph": "X", "ts": Infinity, "dur": "x"}}, {good}]}}')
    assert capture.ops.start_ns.tolist() == [1712345678901234567] * 2


def test_environment(tmp_path: Path) -> None:
    devices = [
        {"id": i, "name": f"GPU {i}", "totalGlobalMem": 80 * i, "computeMajor": 9, "computeMinor": i} for i in (0, 1)
    ]
    rows = [row("kernel", "k", 1.0, 1.0, 7, 1, device=1, stream=7, correlation=1)]
    content = document(
        rows, deviceProperties=devices, distributedInfo={"rank": 3, "world_size": 8}, cuda_runtime_version=12040
    )
    found = read(tmp_path, content).environment
    assert (found.gpu, found.num_gpus, found.memory_bytes, found.compute_capability) == ("GPU 1", 2, 80, "9.1")
    assert (found.rank, found.world_size, found.cuda) == (3, 8, "12.4")
    assert read(tmp_path, document(rows)).environment.rank is None


def test_layout_of_2021(tmp_path: Path) -> None:
    stack = "train.py(41): step;train.py(90): main"
    rows = [
        row("Operator", "ProfilerStep#7", 0, 100, "42", **{"Call stack": "profiler.py(1): step;train.py(90): main"}),
        row("Operator", "enumerate(DataLoader)#_Iter.__next__", 1, 9, "42"),
        row("Operator", "aten::mm", 20, 10, "42", **{"Call stack": stack}),
        row("Operator", "aten::add", 40, 10, "42", **{"Call stack": "train.py(42): step;train.py(90): main"}),
        row("Runtime", "cudaLaunchKernel", 21, 2, "43", correlation=9, **{"external id": 3}),
        row("Kernel", "k", 30, 5, 7, 0, device=0, stream=7, correlation=9),
        row("Memset", "Memset (Device)", 36, 1, 7, 0, device=0, stream=7, correlation=10),
    ]
    capture = read(tmp_path, document(rows))
    assert [capture.text(int(i)) for i in capture.ops.name] == ["aten::mm", "aten::add"]
    assert capture.steps.index.tolist() == [7]
    assert sorted(capture.ranges.kind.tolist()) == [RangeKind.STEP, RangeKind.PHASE]
    assert capture.ops.thread.tolist() == [42, 42]
    frames = [
        (capture.text(int(n)), int(a), int(b))
        for n, a, b in zip(capture.frames.name, capture.frames.start_ns, capture.frames.end_ns, strict=True)
    ]
    assert frames == [
        ("train.py(90): main", 20_000, 50_000),
        ("train.py(41): step", 20_000, 30_000),
        ("train.py(42): step", 40_000, 50_000),
    ]
    assert capture.costs.frame_ns == 0  # those frames were not traced one by one


def test_legacy_list_knows_the_device_by_process(tmp_path: Path) -> None:
    rows = [
        {"name": "add", "ph": "X", "ts": 1.5, "dur": 2.25, "tid": 1, "pid": "CPU functions", "args": {}},
        {"name": "add", "ph": "s", "ts": 1.5, "tid": 1, "pid": "CPU functions", "id": 0, "cat": "cpu_to_cuda"},
        {"name": "add", "ph": "X", "ts": 9.5, "dur": 12.5, "tid": 0, "pid": "CUDA functions", "args": {}},
        {"name": "Memcpy HtoD (Pageable -> Device)", "ph": "X", "ts": 30, "dur": 1, "tid": 0, "pid": "CUDA functions"},
    ]
    capture = read(tmp_path, rows)
    assert len(capture.ops) == 1
    assert capture.work.kind.tolist() == [WorkKind.KERNEL, WorkKind.MEMCPY]
    assert capture.work.memory.tolist() == [HostMemory.UNKNOWN, HostMemory.PAGEABLE]


def test_rocm_without_correlation_is_joined_by_external_id(tmp_path: Path) -> None:
    rows = [
        row("cuda_runtime", "hipLaunchKernel", 1, 2, **{"External id": 4}),
        row("cuda_runtime", "hipLaunchKernel", 5, 2, **{"External id": 4}),  # the same op launches twice
        row("cuda_runtime", "hipMemcpyWithStream", 8, 2, **{"External id": 4}),
        row("cuda_runtime", "hipStreamSynchronize", 11, 9, **{"External id": 4}),
        row("kernel", "first", 3, 1, 0, 2, **{"External id": 4}),
        row("kernel", "second", 7, 1, 0, 2, **{"External id": 4}),
        row("gpu_memcpy", "CopyHostToDevice", 12, 1, 0, 2, bytes=8, **{"External id": 4}),
    ]
    capture = read(tmp_path, document(rows))
    assert len(set(capture.calls.correlation.tolist())) == 4
    by_name = {capture.text(int(n)): int(c) for n, c in zip(capture.work.name, capture.work.correlation, strict=True)}
    launches = capture.calls.correlation[capture.calls.kind == CallKind.LAUNCH].tolist()
    assert [by_name["first"], by_name["second"]] == launches
    assert by_name["CopyHostToDevice"] == capture.calls.correlation[capture.calls.kind == CallKind.MEMCPY][0]
    assert (capture.work.device[0], capture.work.stream[0]) == (2, 0)
    assert capture.work.copy.max() == CopyKind.H2D


def test_ids_that_repeat_across_cycles(tmp_path: Path) -> None:
    rows = []
    for at in (0.0, 1_000_000.0):
        rows += [launch(at + 1, 77, "cudaGraphLaunch"), *(kernel(at + 10 + k, 0.5, 77) for k in range(3))]
    capture = read(tmp_path, document(rows))
    first, second = capture.calls.correlation.tolist()
    assert first != second
    assert capture.work.correlation.tolist() == [first] * 3 + [second] * 3


def test_cuda_sync_rows(tmp_path: Path) -> None:
    rows = [
        launch(1, 5, "cudaEventRecord"),
        launch(3, 6, "cudaStreamWaitEvent"),
        row(
            "cuda_sync",
            "Stream Wait Event",
            3,
            0,
            20,
            0,
            cuda_sync_kind="Stream Wait Event",
            stream=20,
            correlation=6,
            wait_on_cuda_event_record_corr_id=5,
        ),
        row(
            "cuda_sync",
            "Stream Sync",
            9,
            4,
            1_000_007,
            0,
            cuda_sync_kind="Stream Sync",
            stream=7,
            correlation=8,
            wait_on_cuda_event_record_corr_id=18446744073709551615,
        ),
        row("cuda_sync", "Context Sync", 20, 4, -1, 0, cuda_sync_kind="Context Sync", stream=4294967295, correlation=9),
    ]
    syncs = read(tmp_path, document(rows)).stream_syncs
    assert syncs.kind.tolist() == [CallKind.STREAM_WAIT, CallKind.SYNC_STREAM, CallKind.SYNC_DEVICE]
    assert syncs.stream.tolist() == [20, 7, -1]
    assert syncs.record_correlation.tolist() == [5, -1, -1]


def test_kernels_lost_at_the_start_are_noted(tmp_path: Path) -> None:
    rows = [launch(1, 1), launch(2, 2), launch(3, 3), kernel(10, 5, 3), kernel(0.5, 0.2, 99)]
    notes = {note.code: note.count for note in read(tmp_path, document(rows)).notes}
    assert notes == {"no-steps": 1, "missing-kernels": 2, "missing-launches": 1}


def test_cpu_only_and_other_accelerators(tmp_path: Path) -> None:
    rows = [row("cpu_op", "aten::mm", 1, 2), row("mtia_ccp_events", "k", 1, 2, stream=3)]
    codes = {note.code for note in read(tmp_path, document(rows)).notes}
    assert {"no-device-rows", "other-accelerator"} <= codes


def test_text_is_interned_once(tmp_path: Path) -> None:
    capture = read(tmp_path, document(two_steps()))
    assert len(capture.strings) == len(set(capture.strings))
    assert np.bincount(capture.calls.name, minlength=len(capture.strings)).max() == 2


@pytest.mark.parametrize("gone", [1, 3])
def test_launches_whose_kernels_were_lost_are_said(tmp_path: Path, gone: int) -> None:
    rows = [each for i in range(10) for each in (launch(20.0 * i, i + 1), kernel(20.0 * i + 8, 5.0, i + 1))]
    capture = read(tmp_path, document([each for i, each in enumerate(rows) if i not in range(9, 9 + 2 * gone, 2)]))
    assert {note.code: note.count for note in capture.notes} == {"no-steps": 1, "lost-kernels": gone}


def test_launches_into_a_graph_have_no_kernels(tmp_path: Path) -> None:
    names = (
        "cudaLaunchKernel",
        "cudaStreamBeginCapture",
        "cudaLaunchKernel",
        "cudaStreamEndCapture",
        "cudaGraphLaunch",
    )
    rows = [launch(10.0 * i, i + 1, name, 5.0) for i, name in enumerate(names)]
    capture = read(tmp_path, document([*rows, kernel(7.0, 2.0, 1), kernel(50.0, 2.0, 5)]))
    assert [note.code for note in capture.notes] == ["no-steps"]


@pytest.mark.parametrize("spelt", ["Kernel", "KERNEL", "kernel,gpu", " kernel "])
def test_categories_however_they_are_spelt(tmp_path: Path, spelt: str) -> None:
    rows = [each | {"cat": spelt} if each["cat"] == "kernel" else each for each in two_steps()]
    capture = read(tmp_path, document(rows))
    assert summarise(capture) == summarise(read(tmp_path, document(two_steps())))
    assert capture.notes == ()


def test_categories_that_nobody_knows_are_said(tmp_path: Path) -> None:
    strange = [row(cat, "x", 1, 2) for cat in ("kernels", "kernels", "my_tool", "third", "fourth")]
    lone = {key: value for key, value in row("", "x", 1, 2).items() if key != "cat"}
    known = [row(cat, "x", 1, 2) for cat in ("Trace", "gpu_user_annotation", "overhead")]
    (note,) = read(tmp_path, document([*two_steps(), *strange, lone, *known])).notes
    assert (note.code, note.count) == ("unknown-categories", 6)
    assert "kernels" in note.text
    assert note.text.endswith("...")


@pytest.mark.parametrize(("rank", "told"), [(3, 3), ("3", 3), (0, 0), (-1, None), ("none", None), (None, None)])
def test_rank(tmp_path: Path, rank: Any, told: int | None) -> None:
    trace = document(two_steps(), distributedInfo={"rank": rank, "world_size": 4})
    assert read(tmp_path, trace).environment.rank == told


def test_a_stream_that_is_no_number_is_that_of_the_row(tmp_path: Path) -> None:
    rows = two_steps()
    for each in rows:
        if "stream" in each["args"]:
            each["args"] |= {"stream": "default", "device": None}
    found = read(tmp_path, document(rows)).work
    assert set(found.stream.tolist()) == {7}
    assert set(found.device.tolist()) == {0}
