"""Several ranks together: clocks, the late rank and why, findings said once. Captures by hand, exact to the ns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_capture import GEMM, MS, START, US, Machine, run_loop, site

from perfdoctor.diagnose import diagnose, diagnose_ranks
from perfdoctor.diagnose.clock_alignment import Alignment, align, collectives
from perfdoctor.diagnose.finding import RankRow
from perfdoctor.diagnose.ranks import excess, lateness, line_excess, own_parts
from perfdoctor.record.capture import (
    CallKind,
    Calls,
    Capture,
    CopyKind,
    Environment,
    Hits,
    HostMemory,
    RangeKind,
    Ranges,
    Samples,
    Steps,
    Work,
    WorkKind,
)
from perfdoctor.record.timeline import Timeline

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
OTHER_PROTOCOL = "ncclDevKernel_AllReduce_Sum_f32_TREE_LL128(ncclDevKernelArgsStorage<4096ul>)"
STEP = 10 * MS


def by_hand(
    number: int,
    arrivals: list[list[int]],
    *,
    clock_ns: int = 0,
    end_ns: int = 6 * MS,
    name: str = NCCL,
    marked: bool = True,
    first_step: int = 0,
) -> Capture:
    """Steps of 10 ms. In step s each of `arrivals[s]` is when an all-reduce starts, ns from the step's begin; it ends
    `end_ns` after the step's begin, plus 1 ms for each before it. `clock_ns`: what this rank's clock is ahead."""
    calls, work, steps = [], [], []
    correlation = 0
    for s, starts in enumerate(arrivals):
        begin = START + clock_ns + (first_step + s) * STEP
        steps.append((begin, begin + STEP, first_step + s, 1, -1, 1, 0))
        rows = [(begin + 100 * US, begin + 600 * US, 0)]
        rows += [(begin + at, begin + end_ns + i * MS, 1) for i, at in enumerate(starts)]
        for i, (start, end, string) in enumerate(rows):
            correlation += 1
            calls.append((begin + (10 + i) * US, begin + (11 + i) * US, 1, 2, CallKind.LAUNCH, correlation))
            work.append((start, end, 0, 7 + string, string, WorkKind.KERNEL, correlation, -1, CopyKind.NONE,
                         HostMemory.UNKNOWN, -1))  # fmt: skip
    return Capture(
        source="test",
        calls=Calls.from_rows(calls),
        work=Work.from_rows(work),
        steps=Steps.from_rows(steps if marked else []),
        strings=(GEMM, name, "cudaLaunchKernel"),
        environment=Environment(rank=number, world_size=2),
        path=f"rank{number}.json",
    )


def aligned(*captures: Capture) -> Alignment:
    found = align([collectives(Timeline(capture)) for capture in captures])
    assert found is not None
    return found


def test_offset_and_late_rank_are_exact() -> None:
    # Rank 1's clock is 5 ms ahead; it comes 2 ms after rank 0 in every step.
    early = by_hand(0, [[3 * MS]] * 4)
    late = by_hand(1, [[5 * MS]] * 4, clock_ns=5 * MS)
    found = aligned(early, late)
    assert found.num_common == 4
    assert found.offset_ns == (0, 5 * MS)
    assert found.spread_ns == (0, 0)
    assert (found.end_ns[0] == found.end_ns[1]).all()
    waits = lateness(found)
    assert waits.held_up_ns == (0, 2 * MS)
    assert waits.waited_ns == (2 * MS, 0)
    assert waits.latest == 1


def test_a_rank_is_late_by_what_the_last_but_one_would_have_come_sooner() -> None:
    ranks = [by_hand(number, [[at]] * 3) for number, at in enumerate((1 * MS, 4 * MS, 5 * MS))]
    waits = lateness(aligned(*ranks))
    assert waits.held_up_ns == (0, 0, 1 * MS)
    assert waits.waited_ns == (4 * MS, 1 * MS, 0)


def test_lateness_goes_to_whoever_is_last_in_each_collective() -> None:
    # Two collectives a step: rank 0 is 1 ms late to the first, rank 1 is 0.5 ms late to the second.
    first = by_hand(0, [[5 * MS, 6 * MS]] * 2)
    second = by_hand(1, [[4 * MS, 6 * MS + 500 * US]] * 2)
    waits = lateness(aligned(first, second))
    assert waits.held_up_ns == (1 * MS, 500 * US)
    assert waits.waited_ns == (500 * US, 1 * MS)


def test_collectives_are_matched_by_the_loops_own_steps() -> None:
    # Rank 1 began to record one step later: its first collective is rank 0's second.
    first = by_hand(0, [[3 * MS]] * 4)
    second = by_hand(1, [[4 * MS]] * 4, clock_ns=-2 * MS, first_step=1)
    found = aligned(first, second)
    assert found.num_common == 3
    assert found.offset_ns == (0, -2 * MS)


def test_unmarked_recordings_are_matched_from_the_end_where_that_fits() -> None:
    # Steps of different lengths: only one way to lay four collectives over five.
    whole = by_hand(0, [[3 * MS]] * 5, marked=False)
    work = whole.work
    stretch = np.array([0, 0, 1, 1, 5, 5, 6, 6, 13, 13]) * MS
    whole = replace(whole, work=replace(work, start_ns=work.start_ns + stretch, end_ns=work.end_ns + stretch))
    cut = replace(whole, work=whole.work.take(np.arange(10) >= 2), environment=Environment(rank=1, world_size=2))
    found = aligned(whole, cut)
    assert found.num_common == 4
    assert found.offset_ns == (0, 0)
    assert found.spread_ns == (0, 0)


def test_the_protocol_in_a_kernels_name_does_not_part_ranks() -> None:
    found = aligned(by_hand(0, [[3 * MS]] * 3), by_hand(1, [[3 * MS]] * 3, name=OTHER_PROTOCOL))
    assert found.num_common == 3


def test_ranks_without_a_common_collective_have_no_common_clock() -> None:
    alone = run_loop(lambda machine, step: machine.launch(2 * MS) and None, 4).capture()
    assert align([collectives(Timeline(alone)), collectives(Timeline(by_hand(1, [[MS]])))]) is None
    assert align([collectives(Timeline(alone))]) is None


def test_ranges_of_gloo_stand_in_where_no_kernel_ran() -> None:
    def host(number: int, start: int, clock: int) -> Capture:
        rows = [
            (START + clock + s * STEP + start, START + clock + s * STEP + 6 * MS, 3, 0, RangeKind.USER)
            for s in range(3)
        ]
        steps = [(START + clock + s * STEP, START + clock + (s + 1) * STEP, s, 1, -1, 1, 0) for s in range(3)]
        full = Capture(
            source="t", ranges=Ranges.from_rows(rows), steps=Steps.from_rows(steps), strings=("gloo:all_reduce",)
        )
        return Capture(source="session", full=full, environment=Environment(rank=number, world_size=2))

    captures = [host(0, 2 * MS, 0), host(1, 5 * MS, 700 * US)]
    found = aligned(*captures)
    assert found.offset_ns == (0, 700 * US)
    assert lateness(found).held_up_ns == (0, 3 * MS)


@settings(max_examples=50)
@given(
    clocks=st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=4),
    arrivals=st.lists(st.integers(1 * MS, 5 * MS), min_size=1, max_size=5),
)
def test_any_clocks_are_found(clocks: list[int], arrivals: list[int]) -> None:
    ranks = [by_hand(i, [[at] for at in arrivals], clock_ns=clock) for i, clock in enumerate([0, *clocks])]
    found = aligned(*ranks)
    assert found.offset_ns == (0, *clocks)
    assert lateness(found).held_up_ns == (0,) * len(ranks)


# ---- the page ----

READ = site(31)
SLOW_LOADER = 4 * MS


def loop(number: int, *, data_ns: int, end_ns: int = 9 * MS) -> Capture:
    """A step of 12 ms: data, a kernel, a read, then an all-reduce that ends 9 ms after the step's begin."""

    def body(machine: Machine, step: int) -> None:
        begin = machine.now
        machine.host(data_ns, pause="data")
        machine.launch(1 * MS)
        machine.read(at=READ)
        machine.launch(begin + end_ns - machine.now - machine.latency_ns, NCCL)
        machine.wait_device()
        machine.host(begin + 12 * MS - machine.now)

    environment = Environment(rank=number, world_size=2)
    return run_loop(body, 8).capture(2, environment=environment, path=f"rank{number}.json")


def test_the_late_rank_is_named_with_its_cause() -> None:
    diagnosis = diagnose_ranks([loop(0, data_ns=200 * US), loop(1, data_ns=SLOW_LOADER)])
    assert diagnosis.source == "rank1.json"  # the page of the rank that is to blame
    held = SLOW_LOADER - 200 * US
    notes = {row.rank: row.note for row in diagnosis.ranks}
    assert notes == {0: "waits 3.8 ms a step for rank 1", 1: "late: holds the others up 3.8 ms a step"}
    text = " ".join(diagnosis.advice)
    assert "This page is of rank 1, the late one of 2." in text
    assert "Rank 1 is late to the collectives: the others lose 3.8 ms a step to it." in text
    assert "data-wait 3.8 ms" in text
    judged = [diagnose(loop(0, data_ns=200 * US)), diagnose(loop(1, data_ns=SLOW_LOADER))]
    assert dict(excess(1, judged))["data-wait"] == pytest.approx(held, abs=20 * US)
    assert sum(own_parts(judged[0]).values()) == pytest.approx(
        judged[0].accounting.window_ns - judged[0].accounting.communication_ns, abs=4
    )


def test_a_finding_of_all_ranks_is_said_once() -> None:
    diagnosis = diagnose_ranks([loop(0, data_ns=3 * MS), loop(1, data_ns=3 * MS)])
    codes = [(finding.code, finding.site) for finding in (*diagnosis.findings, *diagnosis.leave_alone)]
    assert len(codes) == len(set(codes))
    data = next(finding for finding in diagnosis.findings if finding.code == "data-wait")
    assert "on all 2 ranks" in data.basis
    assert "only on" not in data.title
    assert not any("late" in row.note for row in diagnosis.ranks)


def test_a_finding_of_one_rank_names_it() -> None:
    diagnosis = diagnose_ranks([loop(0, data_ns=10 * US), loop(1, data_ns=SLOW_LOADER)])
    data = next(finding for finding in diagnosis.findings if finding.code == "data-wait")
    assert data.title.endswith("only on rank 1")


def test_a_finding_that_the_page_lacks_comes_from_its_own_rank() -> None:
    slow = loop(0, data_ns=SLOW_LOADER)
    later = by_machine_without_data(1)
    diagnosis = diagnose_ranks([slow, later])
    assert diagnosis.source == "rank1.json"
    data = next(finding for finding in diagnosis.findings if finding.code == "data-wait")
    assert data.title.endswith("only on rank 0")


def by_machine_without_data(number: int) -> Capture:
    def body(machine: Machine, step: int) -> None:
        begin = machine.now
        machine.launch(7 * MS)
        machine.wait_device()
        machine.launch(begin + 9 * MS - machine.now - machine.latency_ns, NCCL)
        machine.wait_device()
        machine.host(begin + 12 * MS - machine.now)

    return run_loop(body, 8).capture(2, environment=Environment(rank=number, world_size=2), path=f"rank{number}.json")


def test_missing_ranks_are_named() -> None:
    diagnosis = diagnose_ranks([loop(0, data_ns=MS)], {1: "its process ended", 2: "too late"})
    assert [row.rank for row in diagnosis.ranks] == [0]
    text = " ".join(diagnosis.advice)
    assert "Without a recording: rank 1: its process ended; rank 2: too late" in text
    assert [note.text for note in diagnosis.notes if note.code == "missing-rank"] == [
        "rank 1: its process ended",
        "rank 2: too late",
    ]


def test_ranks_come_in_order_however_the_files_are_named() -> None:
    diagnosis = diagnose_ranks([loop(1, data_ns=MS), loop(0, data_ns=MS)])
    assert [row.rank for row in diagnosis.ranks] == [0, 1]


def test_what_was_not_recorded_on_a_rank_is_not_zero() -> None:
    never = Capture(source="session", environment=Environment(rank=1, world_size=2))
    diagnosis = diagnose_ranks([loop(0, data_ns=MS), never])
    assert diagnosis.source == "rank0.json"
    idle = diagnosis.ranks[1]
    assert (idle.step_ns, idle.busy_ratio, idle.exposed_communication_ns) == (None, None, None)
    assert idle.note == "no step was timed on it"
    assert "No step was timed on rank 1: it did not train, or ended before." in diagnosis.advice


def test_the_page_is_of_a_rank_whose_device_was_recorded() -> None:
    # A file that was cut before its kernels: its marks say that rank 1 steps slowest, and nothing else.
    cut = replace(loop(1, data_ns=SLOW_LOADER), work=Work.from_rows([]), path="rank1.json")
    whole = loop(0, data_ns=MS)
    for captures in ([whole, cut], [cut, whole]):
        diagnosis = diagnose_ranks(captures)
        assert diagnosis.source == "rank0.json"
        assert diagnosis.ranks[1].step_ns is not None
        assert diagnosis.ranks[1].busy_ratio is None
        assert "No device work was recorded on rank 1:" in " ".join(diagnosis.advice)
    assert "device work was recorded on" not in " ".join(diagnose_ranks([whole, loop(1, data_ns=MS)]).advice)


def test_ranks_that_never_stepped_are_not_ranked() -> None:
    never = [Capture(source="session", environment=Environment(rank=i, world_size=2)) for i in range(2)]
    assert "No step was timed on any of the 2 ranks. This page is of rank 0." in diagnose_ranks(never).advice


def sampled(capture: Capture, *lines: int) -> Capture:
    """With one look at the host's stack at each of these lines."""
    sites = tuple(site(line) for line in sorted(set(lines)))
    rows = [(START + i * MS, 1, sites.index(site(line))) for i, line in enumerate(lines)]
    return replace(capture, sites=sites, hits=Hits.empty(), samples=Samples.from_rows(rows))


def test_the_line_that_makes_a_rank_late() -> None:
    # Of 12 ms a step rank 1 spends 3/4 at line 30, the others 0 and 1/4: 9 - 1.5 ms more.
    ranks = [
        sampled(loop(0, data_ns=MS), 10, 10, 20, 20),
        sampled(loop(1, data_ns=MS), 30, 30, 30, 10),
        sampled(loop(2, data_ns=MS), 10, 10, 20, 30),
    ]
    rows = [RankRow(rank=i, path="", step_ns=12 * MS, busy_ratio=None, exposed_communication_ns=None) for i in range(3)]
    assert line_excess(1, ranks, rows) == (site(30).frame, 7_500_000)
    assert line_excess(1, [loop(0, data_ns=MS), *ranks[1:]], rows) is None  # a rank without samples says nothing
    late = [sampled(loop(0, data_ns=200 * US), 10, 20), sampled(loop(1, data_ns=SLOW_LOADER), 30, 20)]
    text = " ".join(diagnose_ranks(late).advice)
    assert f"data-wait 3.8 ms, 6.0 ms of its host's time at {site(30).frame}" in text
