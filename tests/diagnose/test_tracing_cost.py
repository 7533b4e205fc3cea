"""What the tracer cost in the loop itself: phases before the tracer was on against the same phases while it was.

The loop: a read, 15 ms of host work, 1000 kernels of 30 us. A launch costs the host 5 us, 25 us traced; a tight loop of
launches says that the tracer takes 4. Bare, the read costs the 15 ms: without it the host needs 15 + 5 ms for 30 ms of
device work. Traced, the host alone needs 40.
"""

from __future__ import annotations

import numpy as np
import pytest
from loop_capture import MS, US, Machine, run_loop, site

from perfdoctor.diagnose import diagnose
from perfdoctor.diagnose.tracing_cost import measured_call_ns
from perfdoctor.record.capture import Bare, Capture, Costs, RangeKind, Ranges
from perfdoctor.record.timeline import Timeline

LAUNCHES, BARE_NS, TRACED_NS = 1000, 5 * US, 25 * US
TIGHT = Costs(call_ns=4 * US, op_ns=0, frame_ns=0, measured=True)
Rows = list[tuple[int, int]]


def recorded(
    call_ns: int = TRACED_NS, plain_ns: int = LAUNCHES * BARE_NS, plain: int = 4, waits: bool = False
) -> Capture:
    spans: Rows = []

    def body(machine: Machine, step: int) -> None:
        machine.read(at=site(3))
        machine.host(15 * MS)
        start = machine.now
        for _ in range(LAUNCHES):
            machine.launch(29 * US)
        if waits:
            machine.wait_device()
        spans.append((start, machine.now))

    machine = run_loop(body, 6, call_ns=call_ns)
    first = machine.step_starts[1]
    name = machine.text("backward")
    before = [(first - 100 * MS * (i + 1), first - 100 * MS * (i + 1) + plain_ns) for i in range(plain)]
    rows = [(a, b, 1, name, RangeKind.PHASE) for a, b in (*before, *spans[1:])]
    count = np.zeros(4, np.int64)
    bare = Bare(step_ns=np.full(4, 45 * MS), data_ns=count, samples=count, micro_batches=count + 1, clock="cuda-event")
    return machine.capture(1, ranges=Ranges.from_rows(rows), costs=TIGHT, bare=bare)


def test_the_difference_of_a_phase_over_its_calls() -> None:
    assert measured_call_ns(Timeline(recorded())) == TRACED_NS - BARE_NS


@pytest.mark.parametrize(
    "capture",
    [
        recorded(plain=2),  # too few to be held against
        recorded(waits=True),  # the phase waits for the device: its length says nothing of the host
        recorded(call_ns=300 * US),  # launches that wait for room in the queue
    ],
)
def test_where_the_phases_do_not_say_it(capture: Capture) -> None:
    assert measured_call_ns(Timeline(capture)) is None


def test_a_phase_that_was_slower_untraced_is_no_gain() -> None:
    assert measured_call_ns(Timeline(recorded(plain_ns=90 * MS))) == 0


def test_a_read_in_a_loop_bound_by_its_device_is_priced_right() -> None:
    (found,) = [f for f in diagnose(recorded()).findings if f.code == "host-sync"]
    assert found.headroom is not None
    assert found.headroom.mid_ns == pytest.approx(15 * MS, rel=0.05)
    assert found.headroom.low_ns > 10 * MS
    # With the cost of a tight loop alone the host would seem to need 36 ms.
    (blind,) = [f for f in diagnose(recorded(plain=0)).findings if f.code == "host-sync"]
    assert blind.headroom is not None
    assert blind.headroom.mid_ns < 11 * MS
