"""How long a function takes: on a GPU by CUDA events, on the CPU by the host's clock.

`measurement.measure` is the other question: the wall time from a call to its completion, with a wait after each.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from perfdoctor.bench.measurement import Measurement, measure
from perfdoctor.errors import UsageError
from perfdoctor.record import crossings

if TYPE_CHECKING:
    import torch

_MIN_REPEATS = 5
_L2_ERASED = 4  # times the L2's size is overwritten: what is read after it comes from memory
_HOST_ERASED_BYTES = 1 << 26
_MAX_AHEAD_NS = 20e6
_EVENTS_NS = 10_000  # of the host: two events and the eraser
_CYCLES_PER_NS = 2.0  # of a GPU's clock, about: only how far the host gets ahead hangs on it
_IDLE_NS = 5_000  # between two events with nothing, or one tiny kernel, between them
_HOST_WORK_NS = 100_000  # a host that is busy for this long and leaves the GPU idle does the work itself


def benchmark(
    name: str,
    fn: Callable[[], object],
    *,
    bytes_moved: float | None = None,
    num_flops: float | None = None,
    device: str | torch.device | None = None,
    repeats: int = 30,
    warmup: int = 3,
    budget_s: float = 2.0,
    flush_l2: bool = False,
    graph_calls: int = 0,
) -> Measurement:
    """The times of `fn()`: warmed up, synchronised at the edges only, never between calls.

    On a GPU each time is from the CUDA event before a call to the one after it, on the current stream. The device is
    kept busy until all calls are queued, so a short kernel is timed and not its launch; where it came to an end of that
    before, all are called and timed again with more of it. Where all repeats would keep the host for more than 20 ms,
    or the launch queue overflows, the host does not get ahead, and a call whose launches take longer than its kernels
    is timed as such. The two events themselves are about 5 us of every time: for kernels that are not much longer,
    `graph_calls` takes both the host and the events out. On the CPU it is the host's clock.

    Args:
        bytes_moved, num_flops: of one call; they give `bytes_per_s` and `flops_per_s`.
        device: "cuda", "cuda:1" or "cpu"; by default that of the first tensor which `fn` returns, in lists, tuples and
            dicts too. Without a tensor it is the GPU where there is one, unless `fn` leaves that idle.
        repeats: how many times, fewer (at least 5) where they would take longer than `budget_s` seconds.
        warmup: calls before the first that counts, at least one.
        flush_l2: overwrite the L2 cache before each call (64 MB on the CPU), outside of the time.
        graph_calls: time the replay of a CUDA graph of so many calls, per call. Needs a GPU.

    Raises:
        UsageError: nothing to call or to repeat, a function whose call does nothing yet (it returns a generator or a
            coroutine), a figure or a device that is none, a graph without a GPU, or `flush_l2` with several calls in a
            graph.
    """
    _check_call(name, fn, repeats, warmup, flush_l2, graph_calls)
    _check_figures(name, bytes_moved=bytes_moved, num_flops=num_flops, budget_s=budget_s)
    found = None if device is None else _checked_device(name, device)
    if found is None:
        found = _device_of(name, refuse_unstarted(f"benchmark {name!r}", fn()))
    kind, index = found or _guess()
    if graph_calls and kind != "cuda":
        raise UsageError(f"benchmark {name!r}: graph_calls needs a GPU; leave it out on the {kind}")
    with _current(kind, index):
        run = graph_of(fn, graph_calls) if graph_calls else fn
        enqueue_ns, whole_ns = _warm_up(name, run, warmup, kind)
        affordable = budget_s * 1e9 / max(whole_ns, 1.0)
        repeats = repeats if affordable >= repeats else min(repeats, max(_MIN_REPEATS, int(affordable)))
        erase = _eraser(kind) if flush_l2 else _nothing
        times = _event_times(run, repeats, erase, enqueue_ns) if kind == "cuda" else _host_times(run, repeats, erase)
        if kind == "cuda" and found is None and leaves_idle(times, enqueue_ns):
            times = _host_times(run, repeats, _eraser("cpu") if flush_l2 else _nothing)
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


def refuse_unstarted(what: str, result: object) -> object:
    """The result of a call, unless the call has done nothing yet. Raises UsageError for a generator or coroutine."""
    if isinstance(result, (Generator, Coroutine, AsyncGenerator)):
        raise UsageError(
            f"{what}: the call returns a {type(result).__name__} and its body has not run; give a function that runs "
            "it to its end, as lambda: list(f(x))"
        )
    return result


def leaves_idle(times_ns: list[float], enqueue_ns: float) -> bool:
    """Whether a call that keeps the host so long gave the GPU nothing to speak of: its work is the host's."""
    return enqueue_ns > _HOST_WORK_NS and float(np.median(times_ns)) < _IDLE_NS


def _check_call(
    name: str, fn: object, repeats: object, warmup: object, flush_l2: bool, graph_calls: object
) -> None:  # fmt: skip
    if not callable(fn):
        raise UsageError(
            f"benchmark {name!r}: {fn!r} cannot be called; give a function without arguments, as lambda: f(x)"
        )
    for option, value, least in (("repeats", repeats, 1), ("warmup", warmup, 0), ("graph_calls", graph_calls, 0)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise UsageError(f"benchmark {name!r}: {option}={value!r}; give a whole number from {least} up")
    if flush_l2 and isinstance(graph_calls, int) and graph_calls > 1:
        raise UsageError(f"benchmark {name!r}: flush_l2 reaches only the first call of a graph; use graph_calls=1")


def _check_figures(name: str, **figures: object) -> None:
    for option, value in figures.items():
        if value is None and option != "budget_s":
            continue
        number = isinstance(value, (int, float, np.number)) and not math.isnan(value)
        if not number or value < 0 or (math.isinf(value) and option != "budget_s"):  # type: ignore[operator,arg-type]
            raise UsageError(f"benchmark {name!r}: {option}={value!r}; give a number from 0 up")


def _checked_device(name: str, device: str | torch.device) -> tuple[str, int | None]:
    """Its type and index."""
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f'benchmark {name!r}: {device!r} is no device; it is "cuda", "cuda:1" or "cpu"') from error
    if found.type not in ("cuda", "cpu"):
        raise UsageError(f"benchmark {name!r}: a call on {found} cannot be timed; it is done for cuda and cpu")
    if found.type == "cuda" and not (found.index or 0) < torch.cuda.device_count():
        raise UsageError(
            f"benchmark {name!r}: there is no {found} here, {torch.cuda.device_count()} GPUs are seen; leave `device` "
            "out, or look at CUDA_VISIBLE_DEVICES and the driver"
        )
    return found.type, found.index


def _device_of(name: str, result: object) -> tuple[str, int | None] | None:
    """Where work is done that gives this: the device of its first tensor; None without one."""
    for tensor in _tensors(result):
        if tensor.device.type == "meta":
            return "cpu", None
        return _checked_device(name, tensor.device)
    return None


def _guess() -> tuple[str, int | None]:
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu"), None


def _tensors(result: object, inside: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """`inside`: the containers around it, of which one may be in itself."""
    import torch

    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list, Mapping)) and id(result) not in inside:
        for part in result.values() if isinstance(result, Mapping) else result:
            yield from _tensors(part, (*inside, id(result)))


def _current(kind: str, index: int | None) -> Any:
    """Events, graph and waiting are the current device's: another one is made current meanwhile."""
    import torch

    if kind != "cuda" or index is None or index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(index)


def _warm_up(name: str, run: Callable[[], object], warmup: int, kind: str) -> tuple[float, float]:
    """Nanoseconds that a warm call keeps the host, and that it takes until it is done."""
    finish = settle if kind == "cuda" else _nothing
    for _ in range(max(warmup, 1)):
        refuse_unstarted(f"benchmark {name!r}", run())
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

    def queue_all() -> float:
        began = time.perf_counter_ns()
        for start, end in pairs:
            erase()
            start.record()
            run()
            end.record()
        return time.perf_counter_ns() - began

    queue_ns = 0.0 if crossings.is_emulated() else repeats * (enqueue_ns + _EVENTS_NS)
    if not _queue_ahead(queue_all, pairs[0][0], queue_ns):
        settle()
        queue_all()
    settle()
    return [1e6 * start.elapsed_time(end) for start, end in pairs]


def _queue_ahead(queue_all: Callable[[], float], first: torch.cuda.Event, queue_ns: float) -> bool:
    """Whether all calls were queued before the GPU came to the `first` event. A wrong guess of how long that takes is
    made good once: the times of some calls ahead and some not would be those of two different things."""
    import torch

    for _ in range(2):
        if not 0 < queue_ns <= _MAX_AHEAD_NS:
            return False
        settle()
        torch.cuda._sleep(int(2 * queue_ns * _CYCLES_PER_NS))  # type: ignore[no-untyped-call]
        queue_ns = queue_all()
        if not first.query():  # type: ignore[no-untyped-call]
            return True
    return False


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
