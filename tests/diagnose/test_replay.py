"""Replay: the recorded schedule comes out again, and what an edit gives back is what the simulated machine says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_capture import MS, US, Machine, period, run_loop

from perfdoctor.diagnose.replay import Edits, Replay
from perfdoctor.record.capture import CallKind
from perfdoctor.record.timeline import Timeline

STREAMS = (7, 13, 20)
SYNCS = (CallKind.SYNC_DEVICE, CallKind.SYNC_STREAM, CallKind.SYNC_EVENT)


def replay_of(machine: Machine, first: int = 0) -> Replay:
    return Replay(Timeline(machine.capture(first)))


def calls_of(replay: Replay, *kinds: CallKind) -> frozenset[int]:
    return frozenset(np.flatnonzero(np.isin(replay.timeline.calls.kind, kinds)).tolist())


@dataclass(frozen=True)
class Plan:
    """A loop drawn at random: `(what, ns, stream)` in a step. With `fixed` its syncs are left out."""

    acts: tuple[tuple[str, int, int], ...]
    fixed: bool = False
    traced: bool = True  # whether event records are in the recording
    noted: bool = True  # whether it has `cuda_sync` rows for the waits of streams (whose record is never known)

    def __call__(self, machine: Machine, step: int) -> None:
        for what, ns, stream in self.acts:
            if what == "host":
                machine.host(ns)
            elif what == "kernel":
                machine.launch(ns, stream=stream)
            elif what == "waits":  # for the stream after it in the circle
                after = STREAMS[(STREAMS.index(stream) + 1) % len(STREAMS)]
                machine.record("e", after, traced=self.traced)
                machine.stream_waits("e", stream, noted=self.noted)
            elif what == "copy":
                machine.to_device(ns, 1_000_000, stream=stream)
            elif what == "event":
                machine.record("f", stream, traced=self.traced)
                if not self.fixed:
                    machine.wait_event("f")
            elif self.fixed:
                continue
            elif what == "stream":
                machine.wait_stream(stream, noted=True)
            elif what == "device":
                machine.wait_device()


def acts(streams: tuple[int, ...], syncs: tuple[str, ...]) -> st.SearchStrategy[tuple[tuple[str, int, int], ...]]:
    one = st.tuples(
        st.sampled_from(("host", "kernel", "kernel", "kernel", "copy", *syncs)),
        st.integers(20 * US, 3 * MS),
        st.sampled_from(streams),
    )
    return st.lists(one, min_size=2, max_size=12).map(tuple).filter(lambda a: any(x[0] == "kernel" for x in a))


@settings(max_examples=60)
@given(plan=acts((7,), ("stream", "device")))
def test_replay_gives_the_period_of_a_loop_on_one_stream(plan: tuple[tuple[str, int, int], ...]) -> None:
    machine = run_loop(Plan(plan), 16)
    assert replay_of(machine, first=6).period_ns() == pytest.approx(machine.period_ns, rel=0.01)


@settings(max_examples=60)
@given(plan=acts(STREAMS, ("stream", "device", "event", "waits", "waits")), traced=st.booleans(), noted=st.booleans())
def test_replay_gives_the_period_of_a_loop_on_several_streams(
    plan: tuple[tuple[str, int, int], ...], traced: bool, noted: bool
) -> None:
    machine = run_loop(Plan(plan, traced=traced, noted=noted), 16)
    # A stream that is 1 % slower than one that began 15 steps' worth later overtakes it after those 15 steps only.
    truth = period(Plan(plan, traced=traced, noted=noted), 240)
    # One start of a kernel (1 us here) may be put on the wrong one of two streams that tie: 1 % of a step of 0.1 ms.
    assert replay_of(machine, first=6).period_ns() == pytest.approx(truth, rel=0.01, abs=2 * US)


@settings(max_examples=60)
@given(plan=acts((7,), ("stream", "device", "stream")))
def test_removing_all_syncs_gives_the_period_of_the_loop_without_them(plan: tuple[tuple[str, int, int], ...]) -> None:
    replay = replay_of(run_loop(Plan(plan), 16), first=6)
    truth = period(Plan(plan, fixed=True))
    assert replay.period_ns(Edits(unblocked=calls_of(replay, *SYNCS))) == pytest.approx(truth, rel=0.02)


@settings(max_examples=60)
@given(plan=acts(STREAMS, ("stream", "device", "event", "waits")), traced=st.booleans())
def test_removing_all_syncs_leaves_streams_waiting_for_each_other(
    plan: tuple[tuple[str, int, int], ...], traced: bool
) -> None:
    slow = run_loop(Plan(plan, traced=traced), 16)
    replay = replay_of(slow, first=6)
    freed = replay.period_ns(Edits(unblocked=calls_of(replay, *SYNCS)))
    assert freed == pytest.approx(period(Plan(plan, fixed=True, traced=traced)), abs=0.02 * slow.period_ns)


def read_then_work(fixed: bool, device_ns: int, host_ns: int, launches: int = 20):  # type: ignore[no-untyped-def]
    """Host work, then launches, then a read (not in the fixed loop)."""

    def body(machine: Machine, step: int) -> None:
        machine.host(host_ns)
        for _ in range(launches):
            machine.launch(device_ns // launches)
        if not fixed:
            machine.read()

    return body


@pytest.mark.parametrize(
    ("device_ns", "host_ns"),
    [(47 * MS, 14 * MS), (47 * MS, 1 * MS), (20 * MS, 19 * MS), (5 * MS, 20 * MS), (1 * MS, 20 * MS)],
)
def test_the_read_gives_back_what_the_machine_says(device_ns: int, host_ns: int) -> None:
    slow = run_loop(read_then_work(False, device_ns, host_ns), 12)
    replay = replay_of(slow, first=4)
    gained = replay.period_ns() - replay.period_ns(Edits(unblocked=calls_of(replay, *SYNCS)))
    truth = slow.period_ns - period(read_then_work(True, device_ns, host_ns))
    assert gained == pytest.approx(truth, abs=0.01 * slow.period_ns)


def test_a_loop_whose_read_costs_its_whole_preparation_by_hand() -> None:
    # 47 ms of kernels; the read makes 14 ms of host work wait for them: 14 ms come back, less what hides in latency.
    slow = run_loop(read_then_work(False, 47 * MS, 14 * MS), 12)
    replay = replay_of(slow, first=2)
    # host 14 ms + the first launch's way to the device 6 us + kernels 47 ms + gaps + copy 3 us + return 5 us
    assert slow.period_ns == 14 * MS + 6 * US + 47 * MS + 19 * US + 3 * US + 5 * US
    assert replay.period_ns() == slow.period_ns
    gained = replay.period_ns() - replay.period_ns(Edits(unblocked=calls_of(replay, *SYNCS)))
    # Left: 47 ms of kernels, 20 gaps, and the copy that stays with its gap (2 + 1 us).
    assert gained == 14 * MS + 6 * US + 5 * US - 1 * US


@pytest.mark.parametrize("kind", ["stream", "device", "event"])
def test_each_kind_of_sync_holds_the_host_and_comes_back(kind: str) -> None:
    def loop(fixed: bool):  # type: ignore[no-untyped-def]
        def body(machine: Machine, step: int) -> None:
            machine.host(6 * MS)
            machine.launch(10 * MS)
            if not fixed and kind == "event":
                machine.record("done")
                machine.wait_event("done")
            elif not fixed and kind == "stream":
                machine.wait_stream(noted=True)
            elif not fixed:
                machine.wait_device()

        return body

    slow = run_loop(loop(False), 12)
    replay = replay_of(slow, first=4)
    assert replay.period_ns() == pytest.approx(16 * MS, rel=0.01)
    freed = replay.period_ns(Edits(unblocked=calls_of(replay, *SYNCS)))
    assert freed == pytest.approx(period(loop(True)), rel=0.01)
    assert freed == pytest.approx(10 * MS, rel=0.01)


def test_a_wait_for_an_event_whose_record_was_not_traced_holds_the_host() -> None:
    """Newer profilers leave cudaEventRecord out: the schedule still says that the host waited."""

    def body(machine: Machine, step: int) -> None:
        machine.host(6 * MS)
        machine.launch(10 * MS)
        machine.record("done", traced=False)
        machine.wait_event("done")

    slow = run_loop(body, 12)
    replay = replay_of(slow, first=4)
    assert replay.period_ns() == pytest.approx(16 * MS, rel=0.01)
    assert replay.period_ns(Edits(unblocked=calls_of(replay, *SYNCS))) == pytest.approx(10 * MS, rel=0.01)


@pytest.mark.parametrize("traced", [True, False])
def test_a_host_that_waits_for_the_step_before_last_loses_nothing_by_it(traced: bool) -> None:
    """A run-ahead limiter: each step waits for the event of the one before, while the device has its own work to do."""

    def body(machine: Machine, step: int) -> None:
        machine.host(2 * MS)
        machine.launch(10 * MS)
        machine.record(f"done{step}", traced=traced)
        if step:
            machine.wait_event(f"done{step - 1}")

    slow = run_loop(body, 12)
    replay = replay_of(slow, first=4)
    assert replay.period_ns() == pytest.approx(10 * MS, rel=0.01)
    assert replay.period_ns(Edits(unblocked=calls_of(replay, *SYNCS))) == pytest.approx(10 * MS, rel=0.01)


def two_streams(noted: bool, known: bool, traced: bool, other: bool = False):  # type: ignore[no-untyped-def]
    """Stream 7 computes 8 ms, stream 13 then 5 ms on its result, and stream 7 waits for that in the next step."""

    def body(machine: Machine, step: int) -> None:
        if step:
            machine.stream_waits("there", 7, noted=noted, known=known)
        machine.launch(8 * MS, stream=7)
        machine.record("here", 7, traced=traced)
        machine.stream_waits("here", 13, noted=noted, known=known)
        machine.launch(5 * MS, stream=13)
        machine.record("there", 13, traced=traced)

    return body


@pytest.mark.parametrize(
    ("noted", "known", "traced"),
    [(True, True, True), (True, False, True), (True, False, False), (False, False, True), (False, False, False)],
)
def test_streams_that_wait_for_each_other_stay_in_order(noted: bool, known: bool, traced: bool) -> None:
    """With the record's correlation, with -1 (CUDA 12.9 and later), and without any row that tells."""
    slow = run_loop(two_streams(noted, known, traced), 14)
    assert slow.period_ns == pytest.approx(13 * MS, rel=0.01)
    assert replay_of(slow, first=4).period_ns() == pytest.approx(13 * MS, rel=0.01)


def test_an_event_wait_with_unknown_record_takes_the_record_on_another_stream() -> None:
    """The newest record before the wait is on the waiting stream itself: it is not what the wait is for."""

    def body(machine: Machine, step: int) -> None:
        machine.launch(8 * MS, stream=13)
        machine.record("there", 13)
        machine.launch(1 * MS, stream=7)
        machine.record("here", 7)
        machine.stream_waits("there", 7, noted=True)
        machine.launch(4 * MS, stream=7)
        machine.wait_stream(7, noted=True)

    slow = run_loop(body, 12)
    assert slow.period_ns == pytest.approx(12 * MS, rel=0.01)
    replay = replay_of(slow, first=4)
    assert replay.period_ns() == pytest.approx(12 * MS, rel=0.01)
    # With half the time on the other stream the wait is shorter: 4 + 4 ms. The edge must be the event's.
    launches = replay.timeline.call_of_work[replay.timeline.work.stream == 13]
    halved = Edits(work_scale={int(call): 0.5 for call in launches})
    assert replay.period_ns(halved) == pytest.approx(8 * MS, rel=0.01)


def pageable(fixed: bool):  # type: ignore[no-untyped-def]
    def body(machine: Machine, step: int) -> None:
        machine.host(3 * MS)
        machine.to_device(9 * MS, 147_000_000, pageable=not fixed)
        machine.launch(12 * MS)

    return body


def test_a_pageable_copy_holds_the_host() -> None:
    slow = run_loop(pageable(False), 12)
    # The copy waits for the kernel before it, the host for the copy: 9 + 3 (host) overlaps 12 (kernel).
    replay = replay_of(slow, first=4)
    assert replay.period_ns() == pytest.approx(slow.period_ns, rel=0.001)
    freed = replay.period_ns(Edits(unblocked=calls_of(replay, CallKind.MEMCPY)))
    assert freed == pytest.approx(period(pageable(True)), rel=0.01)


def test_dropped_calls_take_their_work_and_the_host_time_before_them() -> None:
    def loop(fixed: bool):  # type: ignore[no-untyped-def]
        def body(machine: Machine, step: int) -> None:
            machine.host(1 * MS)
            machine.launch(2 * MS)
            for _ in range(0 if fixed else 10):
                machine.host(500 * US)
                machine.launch(100 * US, name="extra", stream=7)
            machine.wait_device()

        return body

    slow = run_loop(loop(False), 12)
    replay = replay_of(slow, first=4)
    extra = replay.timeline.call_of_work[replay.timeline.work.name == slow.text("extra")]
    freed = replay.period_ns(Edits(dropped=frozenset(extra.tolist())))
    assert freed == pytest.approx(period(loop(True)), rel=0.01)


def test_host_time_saved_before_a_call_is_gone_from_a_host_bound_loop_only() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(8 * MS)
        machine.launch(5 * MS)

    replay = replay_of(run_loop(body, 10), first=2)
    saved = Edits(host_saved_ns=dict.fromkeys(calls_of(replay, CallKind.LAUNCH), 2 * MS))
    assert replay.period_ns() - replay.period_ns(saved) == pytest.approx(2 * MS, rel=0.01)
    all_saved = Edits(host_saved_ns=dict.fromkeys(calls_of(replay, CallKind.LAUNCH), 8 * MS))
    assert replay.period_ns(all_saved) == pytest.approx(5 * MS, rel=0.01)  # now the device binds


def test_a_sync_row_without_correlation_names_no_stream_of_another_sync() -> None:
    """-1 is 'unknown' on both sides and links nothing."""

    def body(machine: Machine, step: int) -> None:
        machine.launch(10 * MS, stream=13)
        machine.launch(1 * MS, stream=7)
        machine.read(stream=7)
        machine.host(2 * MS)

    capture = run_loop(body, 8).capture(2)
    from dataclasses import replace

    from perfdoctor.record.capture import StreamSyncs

    unknown = np.where(np.isin(capture.calls.kind, SYNCS), -1, capture.calls.correlation)
    strange = StreamSyncs.from_rows([(capture.calls.start_ns[0], capture.calls.start_ns[0], 6, 13, -1, -1)])
    plain = Replay(Timeline(capture)).period_ns()
    odd = replace(capture, calls=replace(capture.calls, correlation=unknown), stream_syncs=strange)
    assert Replay(Timeline(odd)).period_ns() == plain
