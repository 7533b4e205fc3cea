"""How long a function takes: on a GPU by CUDA events, on the CPU by the host's clock.

`measurement.measure` is the other question: the wall time from a call to its completion, with a wait after each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from perfdoctor.bench.measurement import Measurement, measure
from perfdoctor.errors import UsageError

_MIN_REPEATS = 5
_L2_ERASED = 4  # times the L2's size is overwritten: what is read after it comes from memory
_HOST_ERASED_BYTES = 1 << 26
_MAX_AHEAD_NS = 20e6
_CYCLES_PER_NS = 2.0  # of a GPU's clock, about: only how far the host gets ahead hangs on it


def benchmark(
    name: str,
    fn: Callable[[], object],
    *,
    bytes_moved: float | None = None,
    num_flops: float | None = None,
    device: str | None = None,
    repeats: int = 30,
    warmup: int = 3,
    budget_s: float = 2.0,
    flush_l2: bool = False,
    graph_calls: int = 0,
) -> Measurement:
    """The times of `fn()`: warmed up, synchronised at the edges only, never between calls.

    On a GPU each time is from the CUDA event before a call to the one after it, on the current stream. The device is
    kept busy while the host gets ahead, so a short kernel is timed and not its launch; a call whose launches keep the
    host longer than the device is timed as such (`graph_calls` takes the host out). On the CPU it is the host's clock.

    Args:
        bytes_moved, num_flops: of one call; they give `bytes_per_s` and `flops_per_s`.
        device: "cuda" or "cpu"; by default that of the tensor which `fn` returns, else the GPU where there is one.
        repeats: how many times, fewer (at least 5) where they would take longer than `budget_s` seconds.
        warmup: calls before the first that counts, at least one.
        flush_l2: overwrite the L2 cache before each call (64 MB on the CPU), outside of the time.
        graph_calls: time the replay of a CUDA graph of so many calls, per call. Needs a GPU.

    Raises:
        UsageError: nothing to repeat, a graph without a GPU, or `flush_l2` with several calls in a graph.
    """
    _check(name, repeats, warmup, flush_l2, graph_calls)
    kind = device.split(":")[0] if device else _device_of(fn())
    if graph_calls and kind != "cuda":
        raise UsageError(f"benchmark {name!r}: graph_calls needs a GPU; leave it out on the {kind}")
    run = graph_of(fn, graph_calls) if graph_calls else fn
    enqueue_ns, whole_ns = _warm_up(run, warmup, kind)
    repeats = min(repeats, max(_MIN_REPEATS, int(budget_s * 1e9 / max(whole_ns, 1.0))))
    erase = _eraser(kind) if flush_l2 else _nothing
    if kind == "cuda":
        times = _event_times(run, repeats, erase, enqueue_ns)
    else:
        times = _host_times(run, repeats, erase)
    per_call = max(graph_calls, 1)
    return Measurement(
        name=name, times_ns=tuple(ns / per_call for ns in times), bytes_moved=bytes_moved, num_flops=num_flops
    )


def wall_time(
    name: str, fn: Callable[[], object], *, bytes_moved: float | None = None, num_flops: float | None = None,
    repeats: int = 30, warmup: int = 3, per_run: int = 1,
) -> Measurement:  # fmt: skip
    """Wall time from the call to its completion on the device, per thing done: see `measure`."""
    found = measure(name, fn, settle, repeats=repeats, warmup=warmup, per_run=per_run)
    return replace(found, bytes_moved=bytes_moved, num_flops=num_flops)


def settle() -> None:
    """Wait until the GPU has done all its work; nothing where there is none."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def graph_of(fn: Callable[[], object], num_calls: int) -> Callable[[], object]:
    """The replay of a CUDA graph of `num_calls` calls; what they return lives as long as it does."""
    import torch

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
    settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [fn() for _ in range(num_calls)]
    replay: Callable[[], object] = graph.replay
    return lambda: (replay(), kept)[0]


def _check(name: str, repeats: int, warmup: int, flush_l2: bool, graph_calls: int) -> None:
    if repeats < 1 or warmup < 0 or graph_calls < 0:
        raise UsageError(
            f"benchmark {name!r}: repeats={repeats}, warmup={warmup}, graph_calls={graph_calls}; repeats is 1 or more, "
            "the others 0 or more"
        )
    if flush_l2 and graph_calls > 1:
        raise UsageError(f"benchmark {name!r}: flush_l2 reaches only the first call of a graph; use graph_calls=1")


def _device_of(result: object) -> str:
    """Where work is done that gives this: the device of its first tensor."""
    import torch

    parts: Iterable[Any] = result if isinstance(result, (tuple, list)) else (result,)
    for part in parts:
        if isinstance(part, torch.Tensor):
            return part.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def _warm_up(run: Callable[[], object], warmup: int, kind: str) -> tuple[float, float]:
    """Nanoseconds that a warm call keeps the host, and that it takes until it is done."""
    finish = settle if kind == "cuda" else _nothing
    for _ in range(max(warmup, 1)):
        run()
    finish()
    start = time.perf_counter_ns()
    run()
    enqueued = time.perf_counter_ns()
    finish()
    return enqueued - start, time.perf_counter_ns() - start


def _event_times(
    run: Callable[[], object], repeats: int, erase: Callable[[], object], enqueue_ns: float
) -> list[float]:
    import torch

    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]  # type: ignore[no-untyped-call]
    ahead_ns = min(repeats * (enqueue_ns + 10_000), _MAX_AHEAD_NS)  # two events and the eraser are about 10 us
    settle()
    torch.cuda._sleep(int(ahead_ns * _CYCLES_PER_NS))  # type: ignore[no-untyped-call]
    for start, end in pairs:
        erase()
        start.record()
        run()
        end.record()
    settle()
    return [1e6 * start.elapsed_time(end) for start, end in pairs]


def _host_times(run: Callable[[], object], repeats: int, erase: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(repeats):
        erase()
        start = time.perf_counter_ns()
        run()
        times.append(float(time.perf_counter_ns() - start))
    return times


def _eraser(kind: str) -> Callable[[], object]:
    import torch

    num_bytes = _HOST_ERASED_BYTES
    if kind == "cuda":
        cache: int = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        num_bytes = _L2_ERASED * cache
    block = torch.empty(num_bytes, dtype=torch.int8, device=kind)
    return block.zero_


def _nothing() -> None:
    pass
