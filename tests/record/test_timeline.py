"""Timeline: links, launch times, device windows and steps, on recordings written down row by row. Times in ns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from perfdoctor.record import intervals
from perfdoctor.record.capture import CallKind, Calls, Capture, CopyKind, HostMemory, Steps, Work, WorkKind
from perfdoctor.record.timeline import Timeline, step_index

Row = tuple[int, ...]


def call(start: int, end: int, correlation: int, kind: CallKind = CallKind.LAUNCH, thread: int = 1) -> Row:
    return (start, end, thread, 0, kind, correlation)


def kernel(start: int, end: int, correlation: int, stream: int = 7, device: int = 0, name: int = 1) -> Row:
    unknown = (CopyKind.NONE, HostMemory.UNKNOWN, -1)
    return (start, end, device, stream, name, WorkKind.KERNEL, correlation, -1, *unknown)


def step(start: int, end: int, micro: int = 0, samples: int = -1, complete: int = 1) -> Row:
    return (start, end, 0, micro, samples, complete, 0)


def timeline(calls: Sequence[Row] = (), work: Sequence[Row] = (), steps: Sequence[Row] = (), **more: Any) -> Timeline:
    return Timeline(
        Capture(
            source="test",
            calls=Calls.from_rows(calls),
            work=Work.from_rows(work),
            steps=Steps.from_rows(steps),
            **{"strings": ("cudaLaunchKernel", "kernel"), **more},
        )
    )


def test_work_is_linked_to_the_call_of_its_correlation() -> None:
    line = timeline(
        calls=[call(0, 5, 11), call(10, 15, 12), call(20, 25, 13, CallKind.SYNC_STREAM)],
        work=[kernel(8, 20, 11), kernel(20, 30, 12), kernel(30, 40, 99), kernel(40, 50, -1), kernel(50, 60, 13)],
    )
    # 99 is no call's, -1 is unknown, 13 is a sync: it launches nothing.
    assert line.call_of_work.tolist() == [0, 1, -1, -1, -1]


def test_calls_of_unknown_correlation_launch_nothing() -> None:
    assert timeline(calls=[call(0, 5, -1)], work=[kernel(8, 20, -1)]).call_of_work.tolist() == [-1]


def test_a_graph_launch_owns_all_its_kernels() -> None:
    line = timeline(
        calls=[call(0, 5, 1), call(10, 15, 2, CallKind.GRAPH_LAUNCH)],
        work=[kernel(20, 30, 2), kernel(8, 9, 1), kernel(30, 40, 2)],
    )
    first, order = line.works_of_call
    assert [order[first[i] : first[i + 1]].tolist() for i in range(2)] == [[0], [1, 2]]
    assert line.work.start_ns.tolist() == [8, 20, 30]  # sorted


def test_tables_are_sorted_and_the_busiest_device_is_kept() -> None:
    line = timeline(
        calls=[call(10, 12, 2), call(0, 5, 1), call(13, 14, 3)],
        work=[kernel(30, 90, 2, device=1), kernel(9, 20, 1, device=1), *(kernel(t, t + 1, 3) for t in (15, 20, 25))],
    )
    assert line.calls.start_ns.tolist() == [0, 10, 13]
    assert line.work.device.tolist() == [1, 1]
    assert line.call_of_work.tolist() == [0, 1]


def test_busy_is_the_union_over_streams() -> None:
    line = timeline(work=[kernel(0, 10, 1), kernel(5, 15, 2, stream=8), kernel(20, 30, 3), kernel(25, 25, 4)])
    assert [part.tolist() for part in line.busy] == [[0, 20], [15, 30]]
    assert intervals.total(line.busy) == 25


def test_work_launched_before_the_recording_counts_as_launched_before_its_first_call() -> None:
    line = timeline(
        calls=[call(100, 105, 1)],
        # On stream 7 before the first linked work; on stream 8 with no linked work at all; on 7 after it.
        work=[kernel(50, 110, 70), kernel(60, 130, 71, stream=8), kernel(110, 120, 1), kernel(300, 310, 72)],
    )
    assert line.launch_ns.tolist() == [50, 60, 100, 300]
    late = timeline(calls=[call(100, 105, 1)], work=[kernel(104, 110, 70), kernel(110, 120, 1)])
    assert late.launch_ns.tolist() == [99, 100]


def test_a_file_that_links_nothing_says_nothing_about_launches() -> None:
    line = timeline(
        calls=[call(0, 5, 1), call(100, 105, 2)],
        work=[kernel(10, 60, -1), kernel(110, 150, -1)],
        steps=[step(0, 100), step(100, 200)],
    )
    assert line.launch_ns.tolist() == [10, 110]
    assert line.steps is not None
    assert line.steps.window_end_ns.tolist() == [60, 150]


def numbered(start: int, number: int) -> Row:
    return (start, start + 100, number, 0, -1, 1, 0)


def test_steps_of_two_profiler_cycles_are_not_one_run() -> None:
    """Steps 5, 6 and, 10 us of unrecorded loop later, 15, 16, 17: the pause is no idle time of any step."""
    starts = (0, 100, 10_000, 10_100, 10_200)
    line = timeline(
        calls=[call(at + 10, at + 12, i) for i, at in enumerate(starts, 1)],
        work=[kernel(at + 20, at + 90, i) for i, at in enumerate(starts, 1)],
        steps=[numbered(at, n) for at, n in zip(starts, (5, 6, 15, 16, 17), strict=True)],
    )
    steps = line.steps
    assert steps is not None
    assert steps.num_runs == 2
    assert steps.host_start_ns.tolist() == [10_000, 10_100, 10_200]
    assert steps.window_start_ns.tolist() == [10_000, 10_090, 10_190]
    assert steps.window_end_ns.tolist() == [10_090, 10_190, 10_290]


def test_marks_with_work_between_them_are_one_run() -> None:
    """Ranges of 100 every 250 (data is fetched between them), named by tens: no pause of many steps."""
    starts = (0, 250, 500)
    line = timeline(
        calls=[call(at + 10, at + 12, i) for i, at in enumerate(starts, 1)],
        work=[kernel(at + 20, at + 90, i) for i, at in enumerate(starts, 1)],
        steps=[numbered(at, n) for at, n in zip(starts, (10, 20, 30), strict=True)],
    )
    assert line.steps is not None
    assert line.steps.num_runs == 1
    assert len(line.steps) == 3


def test_launch_delay_is_of_linked_work_only() -> None:
    line = timeline(
        calls=[call(100, 105, 1), call(106, 110, 2)],
        work=[kernel(90, 99, 5), kernel(103, 120, 1), kernel(120, 130, 2)],
    )
    assert line.launch_delay_ns.tolist() == [3, 14]


def test_device_windows_run_from_the_end_of_one_steps_work_to_the_end_of_the_next() -> None:
    line = timeline(
        calls=[call(10, 12, 1), call(110, 112, 2), call(150, 152, 3), call(210, 212, 4)],
        work=[kernel(20, 90, 1), kernel(120, 140, 2), kernel(160, 230, 3), kernel(240, 250, 4)],
        steps=[step(0, 100), step(100, 200), step(200, 300)],
    )
    steps = line.steps
    assert steps is not None
    assert steps.origin == "marks"
    assert steps.window_end_ns.tolist() == [90, 230, 250]
    # The first begins with its step or with the device's first work, whichever is later: 20.
    assert steps.window_start_ns.tolist() == [20, 90, 230]


def test_the_first_window_begins_where_the_work_from_before_ends() -> None:
    line = timeline(
        calls=[call(10, 12, 1), call(110, 112, 2)],
        work=[kernel(-50, 15, 1), kernel(120, 140, 2)],
        steps=[step(100, 200)],
    )
    assert line.steps is not None
    assert line.steps.window_start_ns.tolist() == [15]
    assert line.steps.window_end_ns.tolist() == [140]


def test_incomplete_steps_are_left_out_and_counts_come_from_the_marks() -> None:
    line = timeline(
        calls=[call(10, 12, 1), call(110, 112, 2), call(210, 212, 3)],
        work=[kernel(20, 30, 1), kernel(120, 130, 2), kernel(220, 230, 3)],
        steps=[step(0, 100, micro=4, samples=64), step(100, 200, micro=2, samples=32), step(200, 300, complete=0)],
    )
    assert line.steps is not None
    assert len(line.steps) == 2
    assert line.steps.micro_batches == 3.0
    assert line.steps.samples == 48.0
    assert line.steps.index.tolist() == [0, 1]


def test_marks_outside_the_recording_are_no_steps_of_it() -> None:
    line = timeline(
        calls=[call(1000, 1002, 1)], work=[kernel(1010, 1100, 1)], steps=[step(0, 100), step(100, 200), step(900, 1200)]
    )
    assert line.steps is not None
    assert line.steps.index.tolist() == [2]


def test_without_marks_the_turns_of_the_launches_are_the_steps() -> None:
    calls, work = [], []
    for turn in range(6):
        for i in range(3):
            at = 1000 * turn + 100 * i
            calls.append(call(at, at + 5, 10 * turn + i))
            work.append(kernel(at + 50, at + 90, 10 * turn + i, name=1 + i))
    line = timeline(calls, work, strings=("cudaLaunchKernel", "a", "b", "c"))
    steps = line.steps
    assert steps is not None
    assert steps.origin == "repetition"
    assert np.diff(steps.host_start_ns).tolist() == [1000] * 4
    assert len(steps) == 5


def test_without_marks_and_turns_the_window_is_one_step() -> None:
    line = timeline(calls=[call(10, 12, 1)], work=[kernel(20, 90, 1)])
    assert line.steps is not None
    assert line.steps.origin == "window"
    assert not line.steps.known
    assert (line.steps.host_start_ns[0], line.steps.host_end_ns[0]) == (10, 90)
    assert (line.steps.window_start_ns[0], line.steps.window_end_ns[0]) == (20, 90)


def test_an_empty_recording_has_no_steps() -> None:
    line = timeline()
    assert line.steps is None
    assert line.span == (0, 0)
    assert line.device_span == (0, 0)
    assert len(line.launch_delay_ns) == 0
    assert not len(line.busy[0])


def test_host_calls_alone_have_steps_on_the_hosts_clock() -> None:
    line = timeline(calls=[call(10, 12, 1), call(110, 112, 2)], steps=[step(0, 100), step(100, 200)])
    assert line.steps is not None
    assert line.steps.window_start_ns.tolist() == [0, 100]
    assert line.steps.window_end_ns.tolist() == [100, 200]


def test_device_work_alone_is_a_window() -> None:
    line = timeline(work=[kernel(20, 90, 1), kernel(100, 120, 2)])
    assert line.steps is not None
    assert (line.steps.window_start_ns[0], line.steps.window_end_ns[0]) == (20, 120)
    assert line.launch_ns.tolist() == [20, 100]


def test_step_index_counts_from_the_step_that_began_last() -> None:
    starts = np.array([100, 200, 300], np.int64)
    assert step_index(starts, np.array([99, 100, 199, 200, 1000], np.int64)).tolist() == [-1, 0, 0, 1, 2]


def test_a_first_window_that_begins_with_its_own_work_is_not_judged() -> None:
    calls = [call(at + 10, at + 15, i + 1) for i, at in enumerate((0, 100, 200))]
    work = [kernel(at + 20, at + 50, i + 1) for i, at in enumerate((0, 100, 200))]
    marks = [step(at, at + 100) for at in (0, 100, 200)]
    steps = timeline(calls, work, marks).steps
    assert steps is not None
    assert steps.first_cut
    assert (steps.judged, steps.num_judged) == (slice(1, 3), 2)
    assert steps.window_start_ns.tolist() == [20, 50, 150]
    # Work from before the first step tells when its window began.
    steps = timeline([call(-20, -19, 9), *calls], [kernel(-10, -5, 9), *work], marks).steps
    assert steps is not None
    assert not steps.first_cut
    assert (steps.judged, steps.window_start_ns.tolist()) == (slice(0, 3), [-5, 50, 150])


def test_the_only_step_is_idle_until_its_first_work_unless_work_was_lost() -> None:
    one = [step(0, 100)]
    steps = timeline([call(10, 15, 1)], [kernel(20, 50, 1)], one).steps
    assert steps is not None
    assert (steps.num_judged, steps.window_start_ns.tolist(), steps.window_end_ns.tolist()) == (1, [0], [50])
    steps = timeline([call(5, 6, 7), call(10, 15, 1)], [kernel(20, 50, 1)], one).steps
    assert steps is not None
    assert steps.window_start_ns.tolist() == [20]
