"""Devices given as bare numbers, and what scripts for several GPUs ask of a machine with one."""

from __future__ import annotations

import copy
import copyreg
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from perfdoctor.emulate import emulate_cuda


def kinds(log: Any) -> list[tuple[str, str]]:
    return [(hit.kind, log.sites.sites[hit.site].text) for hit in log.hits]


def test_a_module_goes_to_a_rank() -> None:
    with emulate_cuda():
        rank = torch.cuda.current_device()
        for module in (nn.Linear(2, 2).to(rank), nn.Linear(2, 2).to(device=0), nn.Linear(2, 2).to(0, torch.float64)):
            assert module.weight.device == torch.device("cuda", 0)
        assert module.weight.dtype is torch.float64
        assert nn.Linear(2, 2).to(torch.float16).weight.is_cpu


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_number_makes_a_device_like_any_other(tmp_path: Path) -> None:
    real = torch.device
    table = dict(copyreg.dispatch_table)
    with emulate_cuda():
        device = torch.device(0)
        assert type(device) is real
        assert isinstance(device, torch.device)
        assert not isinstance("cuda", torch.device)
        assert torch.device == real
        assert (str(device), str(torch.device("cpu")), str(torch.device("cuda"))) == ("cuda:0", "cpu", "cuda")
        assert torch.device(type="cuda", index=0) == torch.device("cuda:0") == device
        for each in (device, torch.device("cuda"), torch.device("cpu")):
            assert pickle.loads(pickle.dumps(each)) == each
            assert copy.deepcopy(each) == each
        torch.save({"device": device, "x": torch.ones(2, device=device)}, tmp_path / "x.pt")
        assert torch.load(tmp_path / "x.pt", weights_only=False)["device"] == device
        with torch.device(0):
            assert torch.zeros(2).is_cuda

        @torch.jit.script
        def moved(x: torch.Tensor, where: torch.device) -> torch.Tensor:
            return x.to(where)

        assert moved(torch.ones(2), torch.device("cpu")).is_cpu
        with pytest.raises(RuntimeError):
            torch.device("no such device")
    assert torch.device is real
    assert copyreg.dispatch_table == table
    assert pickle.loads(pickle.dumps(torch.device("cpu"))) == torch.device("cpu")


def test_data_parallel_spreads_over_the_one_device() -> None:
    with emulate_cuda() as device:
        model = nn.DataParallel(nn.Linear(3, 2)).cuda()
        here, host = torch.ones(4, 3, device="cuda", requires_grad=True), torch.ones(4, 3)
        pinned = host.pin_memory()
        device.log.hits.clear()
        model(here).sum().backward()
        model(pinned)
        assert device.log.hits == []
        out = model(host)  # from pageable memory
        assert kinds(device.log) == [("h2d_pageable", "out = model(host)  # from pageable memory")]
        assert here.grad is not None
        assert torch.equal(out.cpu(), model.module.cpu()(host))


def test_one_process_for_one_device_is_this_one() -> None:
    seen = []

    def work(rank: int, factor: float) -> None:
        seen.append((torch.ones(2).to(rank) * factor).sum().item())

    with emulate_cuda() as device:
        torch.multiprocessing.spawn(work, args=(3.0,), nprocs=torch.cuda.device_count())
        assert [hit.kind for hit in device.log.hits] == ["h2d_blocking", "item"]
    assert seen == [6.0]


def test_a_storage_is_told_where_to_load(tmp_path: Path) -> None:
    with emulate_cuda():
        torch.save({"x": torch.arange(3.0, device="cuda")}, tmp_path / "x.pt")
        there = torch.load(tmp_path / "x.pt", map_location=lambda storage, location: storage.cuda(0))["x"]
        here = torch.load(tmp_path / "x.pt", map_location=lambda storage, location: storage)["x"]
        assert (there.is_cuda, here.is_cuda) == (True, False)
        assert there.tolist() == here.tolist() == [0, 1, 2]


def test_a_barrier_is_a_wait_of_the_host() -> None:
    before = dist.barrier
    with emulate_cuda() as device:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            dist.barrier()  # of mine
            dist.all_reduce(torch.ones(2, device="cuda"))
        finally:
            dist.destroy_process_group()
        assert ("barrier", "dist.barrier()  # of mine") in kinds(device.log)
        assert [kind for kind, _ in kinds(device.log)].count("barrier") == 1
    assert dist.barrier is before


def test_the_compiler_knows_each_stand_in_by_its_own_rule() -> None:
    trace_rules = pytest.importorskip("torch._dynamo.trace_rules")
    with emulate_cuda():
        trace_rules.get_torch_obj_rule_map.cache_clear()
        trace_rules.get_torch_obj_rule_map()  # raises where two names with two rules share one object
        trace_rules.get_torch_obj_rule_map.cache_clear()


def test_the_compiler_forgets_the_stand_ins() -> None:
    trace_rules = pytest.importorskip("torch._dynamo.trace_rules")
    trace_rules.get_torch_obj_rule_map.cache_clear()
    with emulate_cuda():
        trace_rules.get_torch_obj_rule_map()
    assert torch.cuda.is_available in trace_rules.get_torch_obj_rule_map()


def test_moving_a_module_copies_each_parameter_and_gradient_once() -> None:
    with emulate_cuda() as device:
        model = nn.Linear(3, 2).cuda()
        model(torch.ones(1, 3, device="cuda")).sum().backward()
        device.log.hits.clear()
        model.cpu()
        assert [hit.kind for hit in device.log.hits] == ["cpu"] * 4
        device.log.hits.clear()
        model.cuda()
        assert [hit.kind for hit in device.log.hits] == ["h2d_pageable"] * 4
        assert model.weight.grad is not None
        assert model.weight.grad.is_cuda
