"""Barriers between ranks as hits with their line, in a real process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import perfdoctor
from perfdoctor.record.call_site import HitLog
from perfdoctor.watch.barriers import BarrierHook


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def hits_of(work: Any) -> list[tuple[str, str]]:
    """(kind, line) of the hits while `work()` runs."""
    log = HitLog()
    hook = BarrierHook(log)
    hook.install()
    hook.install()
    try:
        work()
    finally:
        hook.remove()
    assert all(hit.start_ns < hit.end_ns for hit in log.hits)
    return [(hit.kind, log.sites.sites[hit.site].text) for hit in log.hits]


def test_a_barrier_has_its_line(group: None) -> None:
    before = dist.barrier, dist.distributed_c10d.barrier

    def work() -> None:
        dist.barrier()  # the user's own
        dist.all_reduce(torch.ones(1))

    assert hits_of(work) == [("barrier", "dist.barrier()  # the user's own")]
    assert (dist.barrier, dist.distributed_c10d.barrier) == before


def test_that_of_a_logged_value_is_named_for_it(group: None) -> None:
    fabric = pytest.importorskip("lightning_fabric.utilities.distributed", reason="needs Lightning")

    def work() -> None:
        fabric._sync_ddp(torch.ones(1), reduce_op="sum")

    assert hits_of(work) == [("sync_dist", 'fabric._sync_ddp(torch.ones(1), reduce_op="sum")')]


def test_one_that_fails_is_noted_and_passed_on(group: None) -> None:
    def work() -> None:
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            dist.barrier(group=dist.new_group([0]), no_such_option=True)

    assert [kind for kind, _ in hits_of(work)] == ["barrier"]


def test_without_other_ranks_nothing_is_replaced() -> None:
    before = dist.barrier
    hook = BarrierHook(HitLog())
    hook.install()
    assert dist.barrier is before
    hook.remove()


def test_a_session_reports_it(group: None) -> None:
    before = dist.barrier
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with perfdoctor.watch(warmup=2, active=4) as session:
        for batch in session.batches(torch.ones(20, 2, 4)):
            model(batch).sum().backward()
            optimizer.step()
            dist.barrier()
    assert dist.barrier is before
    report = session.diagnosis()
    (found,) = [each for each in (*report.findings, *report.leave_alone) if each.kind == "barrier"]
    assert found.count == 1
    assert found.site is not None
    assert found.site.text == "dist.barrier()"
    assert found.host_blocked_ns is not None
    assert found.host_blocked_ns > 0


@pytest.mark.gpu
def test_on_the_device_its_wait_is_priced_with_it() -> None:
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(6))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = torch.ones(2048, 2048, device="cuda")
        with perfdoctor.watch(warmup=3, active=5) as session:
            for _ in range(40):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                dist.barrier()
    finally:
        dist.destroy_process_group()
    report = session.diagnosis()
    (found,) = [each for each in (*report.findings, *report.leave_alone) if each.kind == "barrier"]
    assert found.site is not None
    assert found.site.text == "dist.barrier()"
    assert found.count == pytest.approx(1.0)
    assert found.basis.startswith("replay"), found.basis


def test_on_an_emulated_device_it_is_counted_once() -> None:
    with perfdoctor.emulate_cuda():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            model = torch.nn.Linear(4, 4).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with perfdoctor.watch(warmup=2, active=4) as session:
                for _ in range(20):
                    model(torch.ones(2, 4, device="cuda")).sum().backward()
                    optimizer.step()
                    dist.barrier()
        finally:
            dist.destroy_process_group()
    (found,) = [each for each in session.diagnosis().findings if each.kind == "barrier"]
    assert found.count == 1
