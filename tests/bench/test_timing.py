"""`benchmark`: what is called how often, what a measurement derives, and the CUDA event path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import perfdoctor
from perfdoctor.bench.measurement import Measurement
from perfdoctor.bench.timing import benchmark, graph_of, wall_time
from perfdoctor.errors import UsageError


def test_rates_are_per_median_call() -> None:
    found = Measurement(name="x", times_ns=(1e6, 2e6, 4e6), bytes_moved=6e9, num_flops=8e9)
    assert found.bytes_per_s == pytest.approx(3e12)  # 6 GB in 2 ms
    assert found.flops_per_s == pytest.approx(4e12)
    assert str(found) == "x: 2 ms +-75 % (3 times), 4 TFLOP/s, 3 TB/s"  # quartiles 1.5 and 3 ms
    bare = Measurement(name="x", times_ns=(1e6,))
    assert bare.bytes_per_s is None
    assert bare.flops_per_s is None


def test_calls_are_warm_up_plus_one_timed_apart_plus_repeats() -> None:
    calls: list[int] = []
    found = benchmark("x", lambda: calls.append(1), device="cpu", repeats=7, warmup=2)
    assert len(found.times_ns) == 7
    assert len(calls) == 2 + 1 + 7


def test_a_slow_call_is_repeated_at_least_five_times() -> None:
    calls: list[int] = []
    assert len(benchmark("x", lambda: calls.append(1), device="cpu", budget_s=0.0).times_ns) == 5


def test_fewer_repeats_than_five_stay_as_asked_for() -> None:
    assert len(benchmark("x", lambda: None, device="cpu", repeats=2, budget_s=0.0).times_ns) == 2


def test_an_error_of_the_function_comes_through() -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        benchmark("x", fail, device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"flush_l2": True, "graph_calls": 2}, "flush_l2 reaches only the first call"),
        ({"device": "cpu", "graph_calls": 1}, "graph_calls needs a GPU"),
    ],
)
def test_wrong_use_names_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        benchmark("x", lambda: None, **options)


def test_wall_time_divides_by_what_a_run_does() -> None:
    found = wall_time("x", lambda: None, bytes_moved=1.0, repeats=6, per_run=4)
    assert len(found.times_ns) == 6
    assert found.bytes_moved == 1.0


def test_the_cache_is_overwritten_before_each_call_outside_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr("perfdoctor.bench.timing._eraser", lambda kind: lambda: order.append("erase"))
    benchmark("x", lambda: order.append("run"), device="cpu", repeats=3, warmup=1, flush_l2=True)
    assert order == ["run", "run", *["erase", "run"] * 3]  # one warm-up, one to see how long it takes


def test_the_device_path_synchronises_at_the_edges_only() -> None:
    """On the emulated device: as many syncs for 40 calls as for 5."""
    with perfdoctor.emulate_cuda():
        block = torch.ones(16, device="cuda")
        counts = []
        for repeats in (5, 40):
            with perfdoctor.sync_guard(budget=100) as guard:
                found = benchmark("add", lambda: block.add_(1.0), repeats=repeats)
            assert len(found.times_ns) == repeats
            counts.append(guard.syncs_per_step)
    assert counts == [4.0, 4.0]  # after the warm-up, after the call timed apart, before the first and after the last


@pytest.mark.gpu
def test_events_time_the_device_and_not_the_launch() -> None:
    block = torch.ones(1 << 28, device="cuda")  # 1 GB: no GPU reads it in less than 0.1 ms, a launch is 10 us
    found = benchmark("sum", block.sum, bytes_moved=4 << 28)
    assert found.bytes_per_s is not None
    assert 1e10 < found.bytes_per_s < 1e13
    assert found.median_ns > 1e5


@pytest.mark.gpu
def test_a_graph_takes_the_host_out() -> None:
    block = torch.zeros(1024, device="cuda")
    found = benchmark("add", lambda: block.add_(1.0), graph_calls=10, repeats=5, warmup=1)
    # One call to see the device, one on the side stream before capture, then replays of 10: 1 + 1 + 5.
    torch.cuda.synchronize()
    assert len(found.times_ns) == 5
    assert found.median_ns > 0
    assert float(block[0]) == 2 + 10 * 7


@pytest.mark.gpu
def test_a_flushed_read_is_slower_than_one_from_the_cache() -> None:
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    block = torch.ones(cache // 10, device="cuda")  # four tenths of the cache
    warm = benchmark("warm", block.sum, device="cuda", graph_calls=1)
    cold = benchmark("cold", block.sum, device="cuda", graph_calls=1, flush_l2=True)
    assert cold.median_ns > warm.median_ns


@pytest.mark.gpu
def test_a_replay_keeps_what_the_calls_returned() -> None:
    block = torch.ones(4, device="cuda")
    replay = graph_of(lambda: block + 1.0, 2)
    replay()
    torch.cuda.synchronize()
    assert float(block.sum()) == 4.0
