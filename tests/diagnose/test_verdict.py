"""diagnose() and diagnose_ranks() end to end: ranking, severity, step times, rates; recordings nobody would expect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_capture import GEMM, MS, POINTWISE, START, UNTRACED, US, Body, Machine, ints, period, run_loop, site

from perfdoctor.diagnose import diagnose, diagnose_ranks
from perfdoctor.diagnose.finding import Binding, Diagnosis, Severity
from perfdoctor.record.capture import (
    Bare,
    CallKind,
    Calls,
    Capture,
    CopyKind,
    Environment,
    Hits,
    HostMemory,
    Note,
    Pauses,
    Phase,
    Ranges,
    Spans,
    Steps,
    StreamSyncs,
    Work,
    WorkKind,
)

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def several(read: bool = True, pageable: bool = True, malloc: bool = True) -> Body:
    """Ailments of 9 ms (a pageable copy of what takes 3 ms pinned), a read before host work, and a tiny allocation."""

    def body(machine: Machine, step: int) -> None:
        machine.host(2 * MS)
        machine.to_device(9 * MS if pageable else 3 * MS, 153_000_000, pageable)
        for _ in range(10):
            machine.launch(2 * MS)
        if read:
            machine.read(at=site(41))
        if malloc:
            machine.allocate(20 * US)

    return body


def test_findings_are_ranked_by_what_comes_back() -> None:
    slow = run_loop(several(), 14)
    environment = Environment(pinned_h2d_bytes_per_s=51_000_000_000)
    diagnosis = diagnose(slow.capture(4, environment=environment))
    codes = [f.code for f in diagnosis.findings]
    assert codes[:2] == ["pageable-copy", "host-sync"]
    gains = [f.headroom.mid_ns for f in diagnosis.findings if f.headroom]
    assert gains == sorted(gains, reverse=True)
    assert "allocator" in [f.code for f in diagnosis.leave_alone]
    assert {f.severity for f in diagnosis.leave_alone} == {Severity.MINOR}
    assert Severity.MINOR not in {f.severity for f in diagnosis.findings}
    truth = slow.period_ns - period(several(pageable=False))
    headroom = diagnosis.findings[0].headroom
    assert headroom is not None
    assert headroom.mid_ns == pytest.approx(truth, abs=0.01 * slow.period_ns)


def test_step_time_and_rates_by_hand() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(4 * MS)
        machine.launch(10 * MS)
        machine.wait_device()

    capture = run_loop(body, 12).capture(2)
    samples = replace(capture.steps, samples=np.full(len(capture.steps), 32, np.int64))
    diagnosis = diagnose(replace(capture, steps=samples))
    assert diagnosis.step is not None
    # 4 ms, 6 us of way, 10 ms, 5 us back
    assert diagnosis.step.median_ns == 14 * MS + 11 * US
    assert diagnosis.step.low_ns == diagnosis.step.high_ns == diagnosis.step.median_ns
    assert diagnosis.steps_per_s == pytest.approx(1e9 / (14 * MS + 11 * US))
    assert diagnosis.samples_per_s == pytest.approx(32e9 / (14 * MS + 11 * US))


def test_bare_steps_are_the_truth_where_there_are_any() -> None:
    slow = run_loop(several(), 14)
    bare = Bare(
        step_ns=ints(*[40 * MS] * 20), data_ns=ints(*[0] * 20), samples=ints(*[64] * 20), micro_batches=ints(*[1] * 20)
    )
    diagnosis = diagnose(slow.capture(4, bare=bare))
    assert diagnosis.step is not None
    assert diagnosis.step.median_ns == 40 * MS
    assert "bare" in diagnosis.step.basis
    assert diagnosis.samples_per_s == pytest.approx(64 / 0.040)
    # The replay knows a step of 31 ms: what comes back is on the scale of the bare step, and that is said.
    truth = (slow.period_ns - period(several(read=False))) * 40 * MS / slow.period_ns
    (read,) = [f for f in diagnosis.findings if f.code == "host-sync"]
    assert read.headroom is not None
    assert read.headroom.mid_ns == pytest.approx(truth, rel=0.05)
    assert any("bare step" in remark for remark in diagnosis.advice)


def test_both_rates_rest_on_the_mean_of_the_same_steps() -> None:
    """Three steps of 10 ms and one of 30: 4 steps and 24 samples in 60 ms. The median step, 10 ms, is no rate."""
    bare = Bare(
        step_ns=ints(10 * MS, 10 * MS, 30 * MS, 10 * MS), data_ns=ints(0, 0, 0, 0), samples=ints(8, 8, 0, 8),
        micro_batches=ints(1, 1, 1, 1),
    )  # fmt: skip
    diagnosis = diagnose(run_loop(several(), 14).capture(4, bare=bare))
    assert diagnosis.step is not None
    assert diagnosis.step.median_ns == 10 * MS
    assert diagnosis.steps_per_s == pytest.approx(4 / 0.060)
    assert diagnosis.samples_per_s == pytest.approx(24 / 0.060)
    assert diagnosis.samples_per_step == 6.0


def test_updates_on_one_batch_share_its_samples() -> None:
    """Four updates on each batch of 8: 2 samples a step of 10 ms, 200 a second."""
    capture = run_loop(clean, 12).capture(2)
    bare = Bare(
        step_ns=ints(*[10 * MS] * 8), data_ns=ints(*[0] * 8), samples=ints(*[8, -1, -1, -1] * 2),
        micro_batches=ints(*[1, 0, 0, 0] * 2),
    )  # fmt: skip
    diagnosis = diagnose(replace(capture, bare=bare))
    assert diagnosis.samples_per_step == 2.0
    assert diagnosis.samples_per_s == pytest.approx(200)
    unseen = diagnose(replace(capture, bare=replace(bare, micro_batches=ints(*[0] * 8), samples=ints(*[-1] * 8))))
    assert unseen.samples_per_step is None


def test_a_partial_step_is_left_out_of_the_median() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host((1 if step == 5 else 9) * MS)
        machine.launch(2 * MS)
        machine.wait_device()

    capture = run_loop(body, 6).capture()
    partial = np.array([0, 0, 0, 0, 0, 1], np.int64)
    diagnosis = diagnose(replace(capture, steps=replace(capture.steps, partial=partial)))
    assert diagnosis.step is not None
    assert diagnosis.step.low_ns == 11 * MS + 11 * US


def rank(number: int, kernel_ns: int, wait_ns: int) -> Capture:
    def body(machine: Machine, step: int) -> None:
        machine.host(200 * US)
        machine.launch(kernel_ns, GEMM)
        machine.launch(wait_ns, NCCL)
        machine.wait_device()

    return run_loop(body, 10).capture(2, environment=Environment(rank=number, world_size=2), path=f"rank{number}.json")


def test_ranks_are_judged_together_by_the_slowest() -> None:
    diagnosis = diagnose_ranks([rank(0, 8 * MS, 4 * MS), rank(1, 12 * MS, 1 * MS)])
    assert [row.rank for row in diagnosis.ranks] == [0, 1]
    assert [row.path for row in diagnosis.ranks] == ["rank0.json", "rank1.json"]
    assert diagnosis.source == "rank1.json"
    assert [row.exposed_communication_ns for row in diagnosis.ranks] == [4 * MS, 1 * MS]
    assert diagnosis.ranks[1].step_ns == 13 * MS + 200 * US + 12 * US
    assert 0.9 < diagnosis.ranks[0].busy_ratio < 1


def test_one_rank_is_no_table() -> None:
    assert diagnose_ranks([rank(0, 8 * MS, 4 * MS)]).ranks == ()


# ---- recordings nobody would expect ----


def nothing_is_healthy(diagnosis: Diagnosis) -> None:
    assert diagnosis.accounting is None
    assert not diagnosis.findings
    assert diagnosis.binding == Binding.UNKNOWN
    assert diagnosis.skipped
    assert diagnosis.steps_per_s is None


def test_an_empty_recording_is_never_healthy() -> None:
    nothing_is_healthy(diagnose(Capture(source="test")))


def test_a_recording_without_device_work_says_so() -> None:
    machine = run_loop(several(), 6)
    diagnosis = diagnose(machine.capture(work=Work.empty()))
    assert diagnosis.accounting is None
    assert any("device" in skipped.why for skipped in diagnosis.skipped)
    assert all(f.headroom is None for f in diagnosis.findings)


def test_device_work_without_any_call_is_accounted_and_not_priced() -> None:
    diagnosis = diagnose(run_loop(several(), 6).capture(calls=Calls.empty()))
    assert diagnosis.accounting is not None
    assert all(f.headroom is None for f in diagnosis.findings)
    # It has device work: what is missing are the host's calls.
    assert not any("no device work" in skipped.why for skipped in diagnosis.skipped)
    assert any("call" in skipped.why for skipped in diagnosis.skipped)


def test_one_call_of_no_length() -> None:
    calls = Calls.from_rows([(START, START, 1, 0, CallKind.LAUNCH, 1)])
    diagnosis = diagnose(Capture(source="test", calls=calls, strings=("cudaLaunchKernel",)))
    assert not diagnosis.findings


def test_a_recording_of_no_length_is_not_judged() -> None:
    calls = Calls.from_rows([(START, START, 1, 0, CallKind.LAUNCH, 1)])
    work = Work.from_rows([(START, START, 0, 7, 0, WorkKind.KERNEL, 1, -1, CopyKind.NONE, HostMemory.UNKNOWN, -1)])
    nothing_is_healthy(diagnose(Capture(source="test", calls=calls, work=work, strings=("kernel",))))


@pytest.mark.parametrize("phase", list(Phase))
def test_hits_without_a_line_name_none(phase: Phase) -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(14 * MS)
        machine.launch(46 * MS)
        machine.read()

    machine = run_loop(body, 8)
    capture = machine.capture(2)
    rows = [(t, t, 1, -1, len(capture.strings), i, phase) for i, t in enumerate(capture.calls.end_ns[2::3].tolist())]
    hits = Hits.from_rows(rows)
    for sites in ((), (site(99),)):
        diagnosis = diagnose(replace(capture, hits=hits, strings=(*capture.strings, "item"), sites=sites))
        (finding,) = [f for f in diagnosis.findings if f.code == "host-sync"]
        assert finding.site is None


def test_no_marks_is_said() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(1 * MS)
        machine.launch(1 * MS, f"k{chr(97 + step % 26)}{chr(97 + step * step % 17)}")

    diagnosis = diagnose(run_loop(body, 30).capture(marked=False))
    assert diagnosis.step is not None
    assert diagnosis.step.num_steps == 0  # no step is known
    assert "no steps" in diagnosis.step.basis
    assert diagnosis.steps_per_s is None
    assert any("marks no steps" in remark for remark in diagnosis.advice)


def test_turns_of_the_launches_stand_for_steps_and_that_is_said() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(14 * MS)
        machine.launch(20 * MS, GEMM)
        machine.launch(10 * MS, POINTWISE)
        machine.launch(16 * MS, "fused_adam")
        machine.read(at=site(41))

    slow = run_loop(body, 12)
    diagnosis = diagnose(slow.capture(2, marked=False))
    (finding,) = [f for f in diagnosis.findings if f.code == "host-sync"]
    assert finding.count == pytest.approx(1, abs=0.15)
    assert finding.headroom is not None
    assert finding.headroom.mid_ns == pytest.approx(14 * MS, rel=0.03)
    assert "turns" in finding.basis
    assert any("marks no steps" in remark for remark in diagnosis.advice)


def test_a_machine_with_two_devices_is_judged_by_the_busier() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(3 * MS)
        machine.launch(5 * MS)
        machine.device = 1
        machine.launch(1 * MS, stream=8)
        machine.launch(1 * MS, stream=8)
        machine.device = 0
        machine.wait_device()

    diagnosis = diagnose(run_loop(body, 8).capture(2))
    assert diagnosis.accounting is not None
    assert diagnosis.accounting.busy_ns > 0


def test_a_schedule_that_the_replay_cannot_give_back_withholds_and_says_why() -> None:
    """The device is held for 10 ms before each kernel by something that is not in the recording (another process)."""

    def body(machine: Machine, step: int) -> None:
        machine.host(100 * US)
        machine.launch(2 * MS)
        machine.read(at=site(41))

    capture = run_loop(body, 10).capture()
    late = 10 * MS * (1 + np.arange(10))
    work = replace(
        capture.work,
        start_ns=capture.work.start_ns + np.repeat(late, 2),
        end_ns=capture.work.end_ns + np.repeat(late, 2),
    )
    diagnosis = diagnose(replace(capture, work=work))
    for finding in diagnosis.findings:
        assert finding.headroom is None or finding.headroom.mid_ns <= 13 * MS


NAMES = (
    GEMM, POINTWISE, NCCL, "cudaLaunchKernel", "data", "gc:2", "worker-start", "item", "h2d_pageable", "empty_cache",
    "anomaly_check", "python_gc", "d2h_race", "strange", "enumerate(DataLoader)", "aten::item", "a.py(3): main",
    "optimizer_step", "next_batch",
)  # fmt: skip
TIME = st.integers(0, 50).map(lambda n: START + n * 100 * US)
LENGTH = st.sampled_from((0, 0, 1, 5 * US, 300 * US, 6 * MS, -20 * US))
NAME = st.integers(-1, len(NAMES) - 1)


def table(*columns: Any) -> Any:
    row = st.tuples(TIME, LENGTH, *columns).map(lambda r: (r[0], r[0] + r[1], *r[2:]))
    return st.lists(row, max_size=25)


THREAD, CORRELATION, KIND = st.integers(1, 3), st.integers(-1, 12), st.sampled_from(tuple(CallKind))


@settings(max_examples=150)
@given(
    calls=table(THREAD, NAME, KIND, CORRELATION),
    work=table(
        st.integers(0, 1), st.sampled_from((7, 13)), NAME, st.sampled_from(tuple(WorkKind)), CORRELATION,
        st.sampled_from((-1, 0, 4, 10**6)), st.sampled_from(tuple(CopyKind)), st.sampled_from(tuple(HostMemory)),
        st.just(-1),
    ),
    ops=table(THREAD, NAME),
    frames=table(THREAD, NAME),
    ranges=table(THREAD, NAME, st.integers(0, 2)),
    stream_syncs=table(st.sampled_from((5, 6, 7, 9)), st.integers(-1, 13), CORRELATION, CORRELATION),
    steps=table(st.integers(0, 5), st.integers(0, 4), st.integers(-1, 8), st.integers(0, 1), st.integers(0, 1)),
    hits=table(THREAD, st.integers(-1, 1), NAME, st.integers(-1, 5), st.sampled_from(tuple(Phase))),
    pauses=table(THREAD, NAME, st.integers(-1, 5), st.just(-1)),
    sites=st.integers(0, 2),
    bare=st.booleans(),
    workers=st.sampled_from((None, 0, 2)),
    measured=st.booleans(),
)  # fmt: skip
def test_any_recording_is_judged_without_a_crash(
    calls: Any, work: Any, ops: Any, frames: Any, ranges: Any, stream_syncs: Any, steps: Any, hits: Any, pauses: Any,
    sites: int, bare: bool, workers: int | None, measured: bool,
) -> None:  # fmt: skip
    capture = Capture(
        source="test",
        calls=Calls.from_rows(calls),
        work=Work.from_rows(work),
        ops=Spans.from_rows(ops),
        frames=Spans.from_rows(frames),
        ranges=Ranges.from_rows(ranges),
        stream_syncs=StreamSyncs.from_rows(stream_syncs),
        steps=Steps.from_rows(steps),
        hits=Hits.from_rows(row for row in hits if row[3] < sites),
        pauses=Pauses.from_rows(pauses),
        strings=NAMES,
        sites=(site(1), site(2))[:sites],
        environment=Environment(num_workers=workers),
        costs=replace(UNTRACED, measured=measured),
        bare=Bare(step_ns=ints(5 * MS), data_ns=ints(0), samples=ints(-1), micro_batches=ints(0)) if bare else None,
    )
    diagnosis = diagnose(capture)
    accounting = diagnosis.accounting
    if accounting is not None:
        parts = (accounting.busy_ns, accounting.unexplained_ns, *accounting.idle_by_code.values())
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(accounting.window_ns, abs=len(parts) + 1)
    for finding in (*diagnosis.findings, *diagnosis.leave_alone):
        assert finding.title
        assert finding.count >= 0
        if finding.headroom is not None:
            assert 0 <= finding.headroom.low_ns <= finding.headroom.mid_ns <= finding.headroom.high_ns


def clean(machine: Machine, step: int) -> None:
    machine.host(200 * US)
    machine.launch(4 * MS, GEMM)
    machine.launch(4 * MS, GEMM)
    machine.wait_device()


def test_launches_whose_kernels_are_gone_are_not_called_idle() -> None:
    """Every second kernel is lost: half of the launches. Busy time is not known, and no cause is priced."""
    capture = run_loop(clean, 10).capture()
    whole = diagnose(capture)
    assert whole.accounting is not None
    cut = diagnose(replace(capture, work=capture.work.take(np.arange(len(capture.work)) % 2 == 0)))
    assert cut.accounting is None
    assert cut.binding == Binding.UNKNOWN
    assert any(row.check == "how busy the GPU was" and "10 of 20 launches" in row.why for row in cut.skipped)
    assert all(f.headroom is None for f in (*cut.findings, *cut.leave_alone))


def test_one_recorded_step_is_as_long_as_its_mark() -> None:
    """10 ms of host before 8 ms of kernels: the device saw 8 ms, the step took 18."""

    def body(machine: Machine, step: int) -> None:
        machine.host(10 * MS)
        machine.launch(8 * MS, GEMM)
        machine.wait_device()

    diagnosis = diagnose(run_loop(body, 1).capture())
    assert diagnosis.step is not None
    assert 18 * MS <= diagnosis.step.median_ns < 18.1 * MS


def test_the_same_rank_twice_is_said() -> None:
    advice = " ".join(diagnose_ranks([rank(0, 8 * MS, 4 * MS), rank(0, 12 * MS, 1 * MS)]).advice)
    assert "This page is of rank 0, the slowest of 2." in advice
    assert "the same rank" in advice


def test_a_cut_file_whose_rest_does_not_fit_together_is_not_called_idle() -> None:
    """The waits for kernels that a cut file lacks: nothing in it explains them, and no GPU idled in them."""

    def body(machine: Machine, step: int) -> None:
        machine.host(200 * US)
        machine.launch(6 * MS, GEMM)
        machine.launch(4 * MS, GEMM)
        machine.wait_device()

    capture = run_loop(body, 10).capture()
    keep = np.arange(len(capture.work)) % 8 != 0  # under a fifth of the launches
    lost = np.isin(capture.calls.correlation, capture.work.correlation[~keep]) & (capture.calls.correlation >= 0)
    cut = replace(
        capture,
        work=capture.work.take(keep),
        calls=capture.calls.take(~lost),
        notes=(Note(code="truncated", text="the file is truncated"),),
    )
    diagnosis = diagnose(cut)
    assert any("is cut" in remark for remark in diagnosis.advice)
    unfit = any(row.check == "what would come back" for row in diagnosis.skipped)
    assert unfit
    assert diagnosis.accounting is None
    assert all(f.gpu_idle_ns is None for f in diagnosis.findings)


def test_work_of_two_devices_is_said() -> None:
    capture = run_loop(clean, 10).capture()
    device = np.where(np.arange(len(capture.work)) == 3, 1, 0)
    diagnosis = diagnose(replace(capture, work=replace(capture.work, device=device)))
    assert "Work of 2 devices was recorded: this page is of device 0." in diagnosis.advice
