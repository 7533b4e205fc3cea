"""`benchmark`: what is called how often, what a measurement derives, and the CUDA event path."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

import perfdoctor
from perfdoctor.bench.measurement import Measurement
from perfdoctor.bench.timing import benchmark, graph_of, leaves_idle, wall_time
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
        ({"repeats": 2.5}, "repeats=2.5; give a whole number from 1 up"),
        ({"warmup": "3"}, "warmup='3'; give a whole number from 0 up"),
        ({"num_flops": -1}, "num_flops=-1; give a number from 0 up"),
        ({"num_flops": math.nan}, "num_flops=nan"),
        ({"bytes_moved": math.inf}, "bytes_moved=inf"),
        ({"bytes_moved": "5"}, "bytes_moved='5'"),
        ({"budget_s": math.nan}, "budget_s=nan"),
        ({"budget_s": -1.0}, "budget_s=-1.0"),
        ({"budget_s": None}, "budget_s=None; give a number from 0 up"),
        ({"repeats": True}, "repeats=True; give a whole number"),
        ({"device": "gpu"}, "'gpu' is no device"),
        ({"device": 1.5}, "1.5 is no device"),
        ({"device": "mps"}, "mps cannot be timed"),
        ({"device": "cuda:99"}, "there is no cuda:99 here"),
    ],
)
def test_wrong_use_names_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        benchmark("x", lambda: None, **options)


@pytest.mark.parametrize("fn", [3, None, "x"])
def test_what_cannot_be_called_is_named(fn: Any) -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        benchmark("x", fn)


def numbers() -> Iterator[int]:
    yield 1


async def answer() -> int:
    return 1


async def answers() -> AsyncIterator[int]:
    yield 1


@pytest.mark.filterwarnings("ignore:coroutine 'answer' was never awaited")
@pytest.mark.parametrize("options", [{}, {"device": "cpu"}])
@pytest.mark.parametrize("fn", [numbers, answer, answers])
def test_a_call_that_has_done_nothing_yet_is_refused(fn: Any, options: dict[str, Any]) -> None:
    """Else what is timed is how long it takes to make a generator: tenths of a microsecond, whatever is in it."""
    with pytest.raises(UsageError, match=f"a {type(fn()).__name__} and its body has not run"):
        benchmark("x", fn, **options)
    if not options:
        with pytest.raises(UsageError, match="its body has not run"):
            perfdoctor.profile_table("x", fn)


def test_a_result_may_hold_itself() -> None:
    ring: list[Any] = []
    ring.append(ring)
    assert len(benchmark("x", lambda: ring, repeats=5).times_ns) == 5


def test_a_budget_without_end_is_no_limit() -> None:
    assert len(benchmark("x", lambda: None, device=torch.device("cpu"), repeats=40, budget_s=math.inf).times_ns) == 40


@pytest.mark.parametrize("wrap", [lambda x: {"loss": x}, lambda x: [("name", x)], lambda x: (1, {"a": [x]})])
def test_the_device_is_that_of_the_first_tensor_however_deep(wrap: Any) -> None:
    """On the emulated device events are made for a GPU's tensor, and none for the CPU's."""
    with perfdoctor.emulate_cuda():
        ours, theirs = wrap(torch.ones(2, device="cuda")), wrap(torch.ones(2))
        for result, syncs in ((ours, 4.0), (theirs, 0.0)):
            with perfdoctor.sync_guard(budget=100) as guard:
                benchmark("x", lambda result=result: result, repeats=5)
            assert guard.syncs_per_step == syncs


def test_whose_work_it_is_where_the_gpu_stays_idle() -> None:
    assert leaves_idle([1_500.0] * 5, 2e6)  # the host is busy for 2 ms, the GPU for a microsecond
    assert not leaves_idle([1_500.0] * 5, 20_000.0)  # a small kernel and its launch
    assert not leaves_idle([400_000.0] * 5, 2e6)  # many launches


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
def test_a_host_slower_than_it_looked_is_not_timed() -> None:
    """One warm call says a few microseconds, the calls that count keep the host 300 each: more time ahead is needed."""
    block = torch.zeros(1024, device="cuda")
    calls = []

    def add() -> torch.Tensor:
        calls.append(1)
        if len(calls) > 5:  # one to see the device, three to warm up, one timed apart
            time.sleep(300e-6)
        return block.add_(1.0)

    found = benchmark("add", add, repeats=20)
    assert len(found.times_ns) == 20
    assert len(calls) == 5 + 20 + 20


@pytest.mark.gpu
def test_a_graph_takes_the_host_out() -> None:
    block = torch.zeros(1024, device="cuda")
    found = benchmark("add", lambda: block.add_(1.0), graph_calls=10, repeats=5, warmup=1)
    # One call to see the device, one on the side stream before capture, then replays of 10: 1 + 1 + 5, and 5 more for
    # each time that the host did not get ahead.
    torch.cuda.synchronize()
    assert len(found.times_ns) == 5
    assert found.median_ns > 0
    assert float(block[0]) in (2 + 10 * 7, 2 + 10 * 12, 2 + 10 * 17)


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


@pytest.mark.gpu
def test_work_of_the_host_is_timed_on_the_host() -> None:
    numbers = list(range(5_000, 0, -1))
    found = benchmark("sort", lambda: sorted(numbers, key=str)[:0])  # no tensor, nothing on the GPU: about 1 ms
    assert found.median_ns > 1e5


@pytest.mark.gpu
def test_another_gpu_is_timed_on_its_own_stream() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    block = torch.ones(1 << 28, device="cuda:1")  # 1 GB: no GPU reads it in less than 0.1 ms
    assert benchmark("sum", block.sum).median_ns > 1e5
    assert torch.cuda.current_device() == 0
