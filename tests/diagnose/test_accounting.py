"""The step adds up on the device's timeline, to the nanosecond, and nothing is claimed twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_capture import GEMM, MS, POINTWISE, US, Body, Machine, ints, run_loop

from perfdoctor.diagnose.accounting import account, idle_claims, windows
from perfdoctor.diagnose.finding import Accounting
from perfdoctor.diagnose.review import Review
from perfdoctor.diagnose.verdict import CHECKS, diagnose
from perfdoctor.record import intervals
from perfdoctor.record.capture import Capture
from perfdoctor.record.timeline import Timeline

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def accounting_of(body: Body, steps: int = 4, first: int = 0) -> Accounting:
    found = diagnose(run_loop(body, steps).capture(first)).accounting
    assert found is not None
    return found


def test_a_read_before_host_work_by_hand() -> None:
    """Kernel 10 ms, a read, 4 ms of host work, on an otherwise idle machine."""

    def body(machine: Machine, step: int) -> None:
        machine.host(4 * MS)
        machine.launch(10 * MS)
        machine.read()

    found = accounting_of(body, 6, first=1)
    # 4 ms host and 6 us to the device; 10 ms kernel, 1 us, 2 us copy; 5 us until the host goes on. The first of five
    # windows is not judged: it begins with its kernel, as what the device did before is not in the recording.
    lead, work, back = 4 * MS + 6 * US, 10 * MS + 1 * US + 2 * US, 5 * US
    assert found.window_ns == work + lead + back
    assert found.busy_ns == 10 * MS + 2 * US
    assert found.matrix_ns == 10 * MS
    assert found.copy_ns == 2 * US
    assert found.bandwidth_ns == 0
    # Between the end of the copy and the next kernel: all the read's. The 1 us between kernel and copy is a kernel gap.
    assert found.idle_by_code == {"host-sync": lead + back, "kernel-gaps": 1 * US}
    assert found.unexplained_ns == 0


def test_classes_of_busy_time_that_overlap_count_once_by_hand() -> None:
    """10 ms of matrix on one stream; beside it 4 ms of collective and 3 ms after; 2 ms of pointwise; 5 ms of copy."""

    def body(machine: Machine, step: int) -> None:
        machine.launch(10 * MS, GEMM, stream=7)
        machine.launch(13 * MS, NCCL, stream=13)  # begins 4 us after the matrix: 3 ms and 4 us stick out
        machine.to_device(5 * MS, 10**6, stream=20)  # hidden behind both
        machine.wait_device()
        machine.launch(2 * MS, POINTWISE, stream=7)
        machine.wait_device()

    found = accounting_of(body, 6, first=1)
    assert found.busy_ns == 13 * MS + 4 * US + 2 * MS
    assert found.matrix_ns == 10 * MS
    assert found.communication_ns == 3 * MS + 4 * US
    assert found.bandwidth_ns == 2 * MS
    assert found.copy_ns == 0
    assert found.matrix_ns + found.communication_ns + found.bandwidth_ns + found.copy_ns == found.busy_ns


def test_a_claimed_nanosecond_is_not_claimed_twice() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(10 * MS)
        machine.launch(5 * MS)

    timeline = Timeline(run_loop(body, 4).capture())
    claims = idle_claims(timeline)
    begin, end = int(windows(timeline)[0][0]), int(windows(timeline)[1][-1])
    everything = intervals.total(claims.idle)
    first = claims.claim("a", (ints(begin), ints((begin + end) // 2)))
    second = claims.claim("b", (ints(begin), ints(end)))
    assert intervals.total(first) + intervals.total(second) == everything
    assert not len(intervals.intersect(first, second)[0])
    assert intervals.total(claims.left) == 0
    # The same cause again gets nothing, and keeps what it has.
    assert intervals.total(claims.claim("a", (ints(begin), ints(end)))) == 0
    assert intervals.total(claims.by_code["a"]) == intervals.total(first)


def test_no_device_work_is_no_accounting() -> None:
    timeline = Timeline(Capture(source="test"))
    assert account(timeline, idle_claims(timeline)) is None


ACT = st.tuples(
    st.sampled_from(("host", "pause", "loader", "kernel", "kernel", "small", "copy", "pageable", "read", "device",
                     "malloc", "nccl", "graph", "event", "unlinked")),
    st.integers(1 * US, 2 * MS),
    st.sampled_from((7, 13, 20)),
)  # fmt: skip


def act(machine: Machine, what: str, ns: int, stream: int) -> None:
    if what == "host":
        machine.host(ns)
    elif what in ("pause", "loader"):
        machine.host(ns, pause="gc:2" if what == "pause" else "data")
    elif what == "kernel":
        machine.launch(ns, stream=stream)
    elif what == "small":
        for _ in range(25):
            machine.launch(2 * US, POINTWISE, stream=stream)
    elif what in ("copy", "pageable"):
        machine.to_device(ns, 10 * ns, pageable=what == "pageable", stream=stream)
    elif what == "read":
        machine.read(stream=stream)
    elif what == "device":
        machine.wait_device()
    elif what == "malloc":
        machine.allocate(ns)
    elif what == "nccl":
        machine.launch(ns, NCCL, stream=stream)
    elif what == "graph":
        machine.launch(ns // 10 + 1, stream=stream, kernels=10)
    elif what == "event":
        machine.record("e", stream)
        machine.stream_waits("e", 7)
    elif what == "unlinked":
        machine._run(ns, "stray", stream, 0)  # type: ignore[arg-type]


@settings(max_examples=80)
@given(
    acts=st.lists(ACT, min_size=1, max_size=12),
    steps=st.integers(1, 6),
    marked=st.booleans(),
    cut=st.integers(0, 2),
    shift=st.lists(st.integers(-300 * US, 300 * US), max_size=6),
)
def test_the_parts_of_any_recording_add_up_to_its_window(
    acts: list[tuple[str, int, int]], steps: int, marked: bool, cut: int, shift: list[int]
) -> None:
    def body(machine: Machine, step: int) -> None:
        for what, ns, stream in acts:
            act(machine, what, ns, stream)

    machine = run_loop(body, steps)
    capture = machine.capture(min(cut, steps - 1), marked=marked)
    for i, by in enumerate(shift):  # clocks are not perfect: some work begins before its launch, some overlaps
        if i < len(capture.work):
            capture.work.start_ns[i] = min(capture.work.start_ns[i] + by, capture.work.end_ns[i])
    review = Review(Timeline(capture))
    for check in CHECKS:
        list(check(review))
    window = windows(review.timeline)
    busy = intervals.intersect(review.timeline.busy, window)
    claimed = list(review.claims.by_code.values())
    parts = [busy, *claimed, review.claims.left]
    assert sum(intervals.total(part) for part in parts) == intervals.total(window)
    together = intervals.EMPTY
    for part in parts:
        together = intervals.merge(together, part)
    np.testing.assert_array_equal(together[0], window[0])
    np.testing.assert_array_equal(together[1], window[1])
    found = diagnose(capture).accounting
    if found is not None and len(review.timeline.steps or ()) == 1:
        assert found.busy_ns + sum(found.idle_by_code.values()) + found.unexplained_ns == found.window_ns


@pytest.mark.parametrize("steps", [2, 3, 20])
def test_the_share_of_busy_time_does_not_hang_on_how_many_steps_were_recorded(steps: int) -> None:
    """3 ms of kernel behind 7 ms of host work: 30 % busy, and all idle time there, from two steps on."""

    def body(machine: Machine, step: int) -> None:
        machine.host(7 * MS)
        machine.launch(3 * MS)
        machine.read()

    found = accounting_of(body, steps)
    assert found.busy_ns / found.window_ns == pytest.approx(0.3, abs=0.001)
    assert found.idle_by_code["host-sync"] == 7 * MS + 11 * US
