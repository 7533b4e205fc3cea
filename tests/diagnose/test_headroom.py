"""What a finding says comes back is what the machine says, for loops drawn at random, bound by host or device."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_capture import MS, US, Body, Machine, period, run_loop, site

from perfdoctor.diagnose import diagnose
from perfdoctor.record.capture import Environment

PINNED = 50_000_000_000
AILMENTS = {"host-sync": "read", "data-wait": "loader", "garbage-collection": "gc", "pageable-copy": "pageable"}
ACTS = st.lists(
    st.tuples(st.sampled_from(("host", "kernel", "kernels")), st.integers(50 * US, 5 * MS)), min_size=1, max_size=8
).map(tuple)


def loop(before: tuple[tuple[str, int], ...], after: tuple[tuple[str, int], ...], ailment: str, ns: int) -> Body:
    """Ordinary work with one ailment in its middle ('' for none)."""

    def work(machine: Machine, acts: tuple[tuple[str, int], ...]) -> None:
        for what, length in acts:
            if what == "host":
                machine.host(length)
            else:
                for _ in range(1 if what == "kernel" else 10):
                    machine.launch(length // (1 if what == "kernel" else 10))

    def body(machine: Machine, step: int) -> None:
        machine.launch(1 * MS)
        work(machine, before)
        if ailment == "read":
            machine.read(at=site(5))
        elif ailment in ("loader", "gc"):
            machine.host(ns, pause="data" if ailment == "loader" else "gc:2")
        elif ailment in ("pageable", "pinned"):
            size = ns * PINNED // 1_000_000_000 // 3
            machine.to_device(ns if ailment == "pageable" else ns // 3, size, pageable=ailment == "pageable")
        work(machine, after)

    return body


@settings(max_examples=60)
@given(before=ACTS, after=ACTS, code=st.sampled_from(sorted(AILMENTS)), ns=st.integers(500 * US, 8 * MS))
def test_headroom_is_the_difference_of_the_two_loops(
    before: tuple[tuple[str, int], ...], after: tuple[tuple[str, int], ...], code: str, ns: int
) -> None:
    slow = run_loop(loop(before, after, AILMENTS[code], ns), 24)
    cured = "pinned" if code == "pageable-copy" else ""
    step, truth = slow.period_ns, slow.period_ns - period(loop(before, after, cured, ns), 60)
    environment = Environment(pinned_h2d_bytes_per_s=PINNED)
    diagnosis = diagnose(slow.capture(10, environment=environment))
    found = [f for f in (*diagnosis.findings, *diagnosis.leave_alone) if f.code == code]
    if not found:
        # A wait that gives nothing back is a loader that keeps up, a collection that the device hides.
        assert truth < 0.05 * step
        return
    (finding,) = found
    assert finding.headroom is not None
    assert finding.headroom.mid_ns == pytest.approx(truth, abs=0.02 * step)
    assert finding.headroom.low_ns - 0.01 * step <= truth <= finding.headroom.high_ns + 0.01 * step
    assert (finding in diagnosis.leave_alone) == (finding.headroom.mid_ns < 0.01 * step)
