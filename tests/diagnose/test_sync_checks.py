"""host-sync, pageable-copy, blocking-copy, anomaly-mode: what they say of loops whose truth is known, and when not."""

from __future__ import annotations

import pytest
from loop_capture import MS, POINTWISE, US, Body, Machine, period, run_loop, site

from perfdoctor.diagnose import diagnose
from perfdoctor.diagnose.finding import Diagnosis, Finding, Severity
from perfdoctor.record.capture import CallKind, Environment, Phase

TOLERANCE = 0.01  # of the step


def found(diagnosis: Diagnosis, code: str) -> list[Finding]:
    return [f for f in diagnosis.findings if f.code == code]


def alone(diagnosis: Diagnosis, code: str) -> list[Finding]:
    return [f for f in diagnosis.leave_alone if f.code == code]


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, [f.title for f in findings]
    return findings[0]


def assert_headroom(finding: Finding, truth: float, step: float) -> None:
    headroom = finding.headroom
    assert headroom is not None
    assert headroom.mid_ns == pytest.approx(truth, abs=TOLERANCE * step)
    assert headroom.low_ns <= headroom.mid_ns <= headroom.high_ns


def reading(host_ns: int, kernel_ns: int, every: int = 1, at: int | None = 41, fixed: bool = False) -> Body:
    """Host work, 20 kernels, and a read every so many steps."""

    def body(machine: Machine, step: int) -> None:
        machine.host(host_ns)
        for _ in range(20):
            machine.launch(kernel_ns // 20)
        if not fixed and step % every == 0:
            machine.read(at=site(at) if at else None)

    return body


@pytest.mark.parametrize("at", [41, None])
def test_a_read_in_a_loop_bound_by_the_device_costs_the_work_after_it(at: int | None) -> None:
    slow = run_loop(reading(14 * MS, 46 * MS, at=at), 12)
    step = slow.period_ns
    truth = step - period(reading(14 * MS, 46 * MS, fixed=True))
    assert truth == pytest.approx(14 * MS, rel=0.01)
    diagnosis = diagnose(slow.capture(2))
    finding = only(found(diagnosis, "host-sync"))
    assert finding.kind == "item"
    assert finding.count == 1
    assert finding.severity == Severity.COST
    # The host launched for 20 x 4 us + 4 us of copy, the device ran 46 ms + gaps: the rest it waited.
    host, device = 84 * US, 6 * US + 46 * MS + 19 * US + 3 * US
    assert finding.host_blocked_ns == device - host + 5 * US
    # Idle: 5 us until the host goes on, 14 ms of work, 6 us of way.
    assert finding.gpu_idle_ns == 14 * MS + 11 * US
    assert_headroom(finding, truth, step)
    assert (str(finding.site.frame) if finding.site else None) == (f"train.py:{at}" if at else None)
    assert "14.0 ms" in finding.afterwards


def test_a_read_in_a_loop_bound_by_the_host_is_left_alone() -> None:
    slow = run_loop(reading(20 * MS, 5 * MS), 12)
    truth = slow.period_ns - period(reading(20 * MS, 5 * MS, fixed=True))
    assert truth == pytest.approx(5 * MS, rel=0.02)  # not host-bound at all: what the host waits comes back
    slow = run_loop(host_bound_reading(False), 12)
    truth = slow.period_ns - period(host_bound_reading(True))
    assert truth < 0.01 * slow.period_ns
    diagnosis = diagnose(slow.capture(2))
    assert not found(diagnosis, "host-sync")
    finding = only(alone(diagnosis, "host-sync"))
    assert finding.host_blocked_ns is not None
    assert_headroom(finding, truth, slow.period_ns)


def host_bound_reading(fixed: bool) -> Body:
    """100 launches 100 us apart of 50 us kernels: the device is always done when the host reads."""

    def body(machine: Machine, step: int) -> None:
        for _ in range(100):
            machine.host(96 * US)
            machine.launch(50 * US)
        if not fixed:
            machine.read(at=site(41))

    return body


def test_a_read_every_tenth_step_is_no_cost_of_every_step() -> None:
    slow = run_loop(reading(14 * MS, 46 * MS, every=10), 30)
    diagnosis = diagnose(slow.capture(5))
    assert not found(diagnosis, "host-sync")
    finding = only(alone(diagnosis, "host-sync"))
    assert finding.count == 2 / 25  # hit in steps 10 and 20 of the 25 recorded
    assert "not in every step" in finding.withheld


def test_no_reads_no_finding() -> None:
    diagnosis = diagnose(run_loop(reading(14 * MS, 46 * MS, fixed=True), 12).capture(2))
    assert not found(diagnosis, "host-sync")
    assert not alone(diagnosis, "host-sync")


def test_lines_are_kept_apart_and_counted() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(5 * MS)
        machine.launch(20 * MS)
        for _ in range(3):
            machine.read(at=site(10))
        machine.launch(1 * MS)
        machine.read(at=site(20))

    diagnosis = diagnose(run_loop(body, 12).capture(2))
    counts = {str(f.site.frame): f.count for f in (*diagnosis.findings, *diagnosis.leave_alone) if f.site}
    assert counts == {"train.py:10": 3, "train.py:20": 1}


def test_a_wait_that_no_hook_caught_is_not_put_on_the_line_of_another() -> None:
    """A read with its hook, then the device wait of something that no hook sees, long after."""

    def body(machine: Machine, step: int) -> None:
        machine.launch(5 * MS)
        machine.read(at=site(10))
        machine.host(2 * MS)
        machine.launch(5 * MS)
        machine.wait_device()
        machine.host(3 * MS)

    diagnosis = diagnose(run_loop(body, 10).capture(2))
    by_kind = {f.kind: f for f in (*diagnosis.findings, *diagnosis.leave_alone) if f.code == "host-sync"}
    assert by_kind["item"].count == 1
    assert by_kind["cuda_synchronize"].count == 1
    assert by_kind["cuda_synchronize"].site is None


def test_two_reads_that_hide_behind_each_other_are_both_kept() -> None:
    """Each read alone gives nothing back, as the other still waits; both give the host work between and after."""

    def loop(first: bool, second: bool) -> Body:
        def body(machine: Machine, step: int) -> None:
            machine.launch(20 * MS)
            if first:
                machine.read(at=site(10))
            if second:
                machine.read(at=site(20))
            machine.host(8 * MS)

        return body

    slow = run_loop(loop(True, True), 12)
    step = slow.period_ns
    assert step - period(loop(False, True)) < 0.01 * step
    assert step - period(loop(True, False)) < 0.01 * step
    together = step - period(loop(False, False))
    assert together == pytest.approx(8 * MS, rel=0.01)
    diagnosis = diagnose(slow.capture(2))
    lines = {str(f.site.frame): f for f in found(diagnosis, "host-sync") if f.site}
    assert set(lines) == {"train.py:10", "train.py:20"}
    assert not alone(diagnosis, "host-sync")
    for finding in lines.values():
        assert finding.headroom is not None
        assert finding.headroom.mid_ns < 0.02 * step
        assert finding.headroom.high_ns == pytest.approx(together, abs=0.02 * step)
    assert any("Together" in remark for remark in diagnosis.advice)


def test_waits_of_every_kind_are_named() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.launch(5 * MS)
        machine.wait_device()
        machine.host(3 * MS)
        machine.launch(5 * MS)
        machine.record("e")
        machine.wait_event("e")
        machine.host(3 * MS)
        machine.launch(5 * MS)
        machine.read(size=1_000_000)
        machine.host(3 * MS)

    diagnosis = diagnose(run_loop(body, 12).capture(2))
    kinds = {f.kind: f.count for f in found(diagnosis, "host-sync")}
    assert kinds == {"cuda_synchronize": 2, "cpu": 1}


def copying(pageable: bool) -> Body:
    """Host 1 ms, a copy of 147 MB, 12 ms of kernels. From pinned memory it takes 3 ms, from pageable memory 9."""

    def body(machine: Machine, step: int) -> None:
        machine.host(1 * MS)
        machine.to_device(9 * MS if pageable else 3 * MS, 153_000_000, pageable)
        for _ in range(10):
            machine.launch(1_200 * US)

    return body


def test_a_pageable_copy_by_hand() -> None:
    slow = run_loop(copying(True), 14)
    step, truth = slow.period_ns, slow.period_ns - period(copying(False))
    assert truth == pytest.approx(6 * MS, rel=0.02)  # 9 - 3 ms of copying, the host is hidden in both
    capture = slow.capture(2, environment=Environment(pinned_h2d_bytes_per_s=51_000_000_000))
    diagnosis = diagnose(capture)
    finding = only(found(diagnosis, "pageable-copy"))
    assert finding.kind == "h2d_pageable"
    assert finding.count == 1
    # The copy waits for the kernels before it: the host waits for both.
    assert finding.host_blocked_ns == pytest.approx(step - 1 * MS - 40 * US, abs=20 * US)
    assert_headroom(finding, truth, step)
    assert finding.headroom is not None
    assert finding.headroom.high_ns >= 9 * MS - 0.01 * step  # at most hidden behind the step before
    assert "153 MB a step" in finding.title
    assert diagnosis.findings[0] is finding


def test_a_pinned_copy_is_no_finding() -> None:
    diagnosis = diagnose(run_loop(copying(False), 14).capture(2))
    assert not [f for f in (*diagnosis.findings, *diagnosis.leave_alone) if "copy" in f.code]


def test_a_constant_built_on_the_host_each_step_is_a_blocking_copy() -> None:
    def loop(fixed: bool) -> Body:
        def body(machine: Machine, step: int) -> None:
            machine.host(4 * MS)
            machine.launch(10 * MS)
            if not fixed:
                start = machine.now
                machine.to_device(2 * US, 8)
                machine.wait_stream()
                machine.hit(site(7), "h2d_blocking", start)
            machine.launch(1 * MS)

        return body

    slow = run_loop(loop(False), 12)
    truth = slow.period_ns - period(loop(True))
    diagnosis = diagnose(slow.capture(2))
    finding = only(found(diagnosis, "blocking-copy"))
    assert finding.kind == "h2d_blocking"
    assert str(finding.site and finding.site.frame) == "train.py:7"
    assert_headroom(finding, truth, slow.period_ns)
    assert not found(diagnosis, "host-sync")


def test_anomaly_mode_takes_its_reads_in_one_finding() -> None:
    def body(machine: Machine, step: int) -> None:
        for _ in range(30):
            machine.launch(500 * US)
            machine.read(at=site(60), kind="anomaly_check")
            machine.host(200 * US)

    diagnosis = diagnose(run_loop(body, 8).capture(2))
    finding = only(found(diagnosis, "anomaly-mode"))
    assert finding.count == 30
    assert finding.headroom is not None
    assert finding.headroom.mid_ns > 5 * MS
    assert not found(diagnosis, "host-sync")
    assert not alone(diagnosis, "host-sync")


def test_hits_alone_tell_lines_and_withhold_what_needs_a_gpu() -> None:
    machine = Machine()
    for _ in range(6):
        machine.step()
        machine.host(5 * MS)
        start = machine.now
        machine.host(1 * MS)
        machine.hit(site(9), "item", start, Phase.SITES)
    diagnosis = diagnose(machine.capture())
    finding = only(found(diagnosis, "host-sync"))
    assert finding.count == 1
    assert finding.host_blocked_ns == 1 * MS
    assert finding.headroom is None
    assert finding.withheld
    assert any("device" in skipped.check for skipped in diagnosis.skipped)


def test_a_line_that_only_the_hooks_saw_does_not_blame_the_device_recording() -> None:
    """Caught in every step of the sites phase; the recorded phase has its device, and no such wait."""
    machine = Machine()
    for step in range(12):
        machine.step()
        start = machine.now
        machine.host(2 * MS)
        if step < 6:
            machine.hit(site(9), "item", start, Phase.SITES)
        else:
            machine.launch(5 * MS)
    finding = only(found(diagnose(machine.capture()), "host-sync"))
    assert finding.count == 1
    assert finding.headroom is None
    assert "no device recording" not in finding.withheld


@pytest.mark.parametrize("kind", ["a_kind_of_a_later_version", ""])
def test_unknown_kinds_break_nothing(kind: str) -> None:
    machine = Machine()
    for _ in range(6):
        machine.step()
        start = machine.now
        machine.host(5 * MS)
        machine.launch(2 * MS, POINTWISE)
        machine.hit(site(9), kind, start, Phase.LIGHT)
        machine.read()
    diagnosis = diagnose(machine.capture())
    assert diagnosis.step is not None


def test_a_read_before_its_copy_has_arrived_is_an_error_first() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(14 * MS)
        machine.launch(46 * MS)
        machine.read(at=site(5))
        start = machine.now
        machine.host(1 * US)
        machine.hit(site(6), "d2h_race", start)

    diagnosis = diagnose(run_loop(body, 8).capture(2))
    assert diagnosis.findings[0].code == "unsynchronised-read"
    assert diagnosis.findings[0].severity == Severity.ERROR
    assert only(found(diagnosis, "host-sync")).site == site(5)


def test_launch_blocking_and_other_switches_are_named() -> None:
    environment = Environment(launch_blocking=True, sync_debug_mode=1, num_workers=16, num_cpus=2.0)
    diagnosis = diagnose(run_loop(reading(1 * MS, 5 * MS), 6).capture(environment=environment))
    kinds = {f.kind for f in found(diagnosis, "debug-switches")}
    assert kinds == {"launch_blocking", "sync_debug_mode", "too_many_workers"}
    fine = Environment(launch_blocking=False, sync_debug_mode=0, num_workers=2, num_cpus=4.0)
    assert not found(diagnose(run_loop(reading(1 * MS, 5 * MS), 6).capture(environment=fine)), "debug-switches")


def test_micro_batches_are_counted_apart() -> None:
    from dataclasses import replace

    def body(machine: Machine, step: int) -> None:
        for _ in range(4):
            machine.launch(5 * MS)
            machine.read(at=site(3))
            machine.host(2 * MS)

    capture = run_loop(body, 8).capture(2)
    capture = replace(capture, steps=replace(capture.steps, micro_batches=capture.steps.micro_batches + 4))
    finding = only(found(diagnose(capture), "host-sync"))
    assert finding.count == 4
    assert finding.count_per_micro_batch == 1


def test_threads_that_read_beside_the_loop_do_not_hold_it() -> None:
    """A second thread waits for the device while the loop goes on launching."""

    def body(machine: Machine, step: int) -> None:
        machine.host(2 * MS)
        for _ in range(5):
            machine.launch(2 * MS)
        start, machine.thread = machine.now, 2
        machine.wait_device()
        machine.now, machine.thread = start, 1

    slow = run_loop(body, 20)
    diagnosis = diagnose(slow.capture(4))
    for finding in (*found(diagnosis, "host-sync"), *alone(diagnosis, "host-sync")):
        assert finding.headroom is None or finding.headroom.mid_ns < 0.01 * slow.period_ns


def test_a_free_call_in_the_first_step_alone_is_set_up() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(5 * MS)
        if step == 0:
            machine.allocate(20 * MS)
            machine.allocate(1 * MS, CallKind.FREE)
        machine.launch(10 * MS)

    assert not found(diagnose(run_loop(body, 8).capture()), "allocator")
