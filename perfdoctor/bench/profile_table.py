"""Where the time of a function goes, op by op, and its stacks for a flame graph."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfdoctor.bench.timing import refuse_unstarted, settle
from perfdoctor.errors import UsageError
from perfdoctor.record import crossings
from perfdoctor.units import format_count, format_duration, format_share
from perfdoctor.watch.profile import profiler_running

_NAME_WIDTH = 60
_THIS_FILE = Path(__file__).name
_PYTHON_FRAME = re.compile(r"\.py\(\d+\): |^<built-in |^nn\.Module: ")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledOp:
    """One op or kernel by name: its own time, without what it calls."""

    name: str
    num_calls: int
    """in all runs"""
    self_ns: float
    """of one run: on the GPU where `ProfileTable.timed_on` is "GPU", else on the CPU"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTable:
    """The ops of `fn`, the most expensive first; printing it gives the table."""

    name: str
    timed_on: str
    """"GPU" or "CPU": whose time counts"""
    num_runs: int
    total_ns: float
    """of one run, all ops together"""
    ops: tuple[ProfiledOp, ...]
    stacks: tuple[tuple[tuple[str, ...], int], ...] = ()
    """(frames, the outermost first; nanoseconds of all runs), where stacks were asked for"""

    def __str__(self) -> str:
        runs = "1 run" if self.num_runs == 1 else f"{self.num_runs} runs"
        where = "device time on the GPU" if self.timed_on == "GPU" else "CPU time: no work of it ran on a GPU"
        lines = [f"{self.name}: {format_duration(self.total_ns)} a run, {where} ({runs}, under torch.profiler)"]
        width = max([len(_short(op.name)) for op in self.ops] or [0])
        for op in self.ops:
            share = format_share(op.self_ns / self.total_ns if self.total_ns else 0.0)
            calls = f"{format_count(op.num_calls / self.num_runs)} x"
            lines.append(f"  {_short(op.name):<{width}}  {format_duration(op.self_ns):>8}  {share:>6}  {calls:>7}")
        if not self.ops:
            lines.append("  no op of torch was called, and nothing ran on a GPU")
        return "\n".join(lines)

    def collapsed_stacks(self) -> str:
        """One stack a line, `outer;inner microseconds`: what flamegraph.pl, inferno and speedscope.app read.

        Raises:
            UsageError: the profile was made without stacks.
        """
        if not self.stacks:
            raise UsageError(
                f"profile {self.name!r} holds no stacks; ask for them: profile_table(..., with_stack=True)"
            )
        return "".join(f"{';'.join(frames)} {max(1, round(ns / 1e3))}\n" for frames, ns in self.stacks)


def profile_table(
    name: str,
    fn: Callable[[], object],
    *,
    with_stack: bool | str | os.PathLike[str] = False,
    top: int = 15,
    runs: int = 3,
    warmup: int = 1,
) -> ProfileTable:
    """Run `fn` under torch.profiler: its ops by the GPU's time, or by the CPU's where nothing ran on a GPU.

    Nothing is synchronised between the runs. The profiler makes the host slower, so CPU times are too long; the order
    and the shares are what to read. Ops of all threads count (older versions of torch
    see those of the caller's thread and of backward's alone).

    Args:
        with_stack: True keeps the Python stacks; a path also writes them there as collapsed stacks, for a flame graph.
            Stacks weigh the time of the CPU ops that were called there, and of the kernels that they launched.
        top: how many ops are kept, the most expensive.

    Raises:
        UsageError: nothing to call, a call that returns a generator or a coroutine not yet run, a count below 1, a path
            that no file can have, or another torch.profiler, running already or started by `fn`.
        OSError: the file cannot be written.
    """
    _check(name, fn, with_stack, top=top, runs=runs, warmup=warmup)
    if profiler_running():
        raise UsageError(f"profile {name!r}: another torch.profiler is running, and it serves one; stop it first")
    events = _record(name, fn, runs, warmup, with_stack is not False)
    on_gpu = any(_device_ns(event) > 0 for event in events)
    ops = _ops(events, on_gpu, runs)
    stacks = _stacks(events, on_gpu) if with_stack is not False else ()
    table = ProfileTable(
        name=name,
        timed_on="GPU" if on_gpu else "CPU",
        num_runs=runs,
        total_ns=sum(op.self_ns for op in ops),
        ops=tuple(ops[:top]),
        stacks=stacks,
    )
    if not isinstance(with_stack, bool):
        Path(with_stack).write_text(table.collapsed_stacks(), "utf-8")
    return table


def _check(name: str, fn: object, with_stack: object, **counts: object) -> None:
    """Complain before the work, not after it."""
    if not callable(fn):
        raise UsageError(
            f"profile {name!r}: {fn!r} cannot be called; give a function without arguments, as lambda: f(x)"
        )
    for option, value in counts.items():
        least = 0 if option == "warmup" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"profile {name!r}: {option}={value!r}; give a whole number from {least} up")
    if isinstance(with_stack, bool):
        return
    if not isinstance(with_stack, (str, os.PathLike)):
        raise UsageError(f"profile {name!r}: with_stack={with_stack!r}; give True, False or the path of a file")
    path = Path(with_stack)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            f"profile {name!r}: with_stack={os.fspath(with_stack)!r} is a folder, or its folder is not there; name a "
            "file that can be written"
        )


def _record(name: str, fn: Callable[[], object], runs: int, warmup: int, with_stack: bool) -> list[Any]:
    """The events, read at once: a later profiler run damages an earlier one's results (torch 2.11)."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(warmup):
        refuse_unstarted(f"profile {name!r}", fn())
    settle()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and not crossings.is_emulated():
        activities.append(ProfilerActivity.CUDA)
    config = _all_threads(with_stack)
    with warnings.catch_warnings():  # torch warns about cycles, of which there is one
        warnings.simplefilter("ignore")
        with profile(activities=activities, with_stack=with_stack, experimental_config=config) as recording:
            for _ in range(runs):
                _call(fn)
            settle()
            lasted = profiler_running()
        if not lasted:
            raise UsageError(
                f"profile {name!r}: fn runs a torch.profiler of its own, which ended this one; take it out"
            )
        return list(recording.events() or ())


def _all_threads(with_stack: bool) -> Any:
    """Ops of threads that `fn` starts too. Without verbose=True, Python stacks do not reach the events."""
    import torch

    config: Any = torch._C._profiler._ExperimentalConfig
    try:
        return config(verbose=with_stack, profile_all_threads=True)
    except TypeError:  # older torch
        return config(verbose=with_stack)


def _call(fn: Callable[[], object]) -> None:
    """A frame of its own: what is above it in a stack is not `fn`."""
    fn()


def _device_ns(event: Any) -> float:
    """The GPU time of a kernel or copy; 0 for what ran on the CPU, which carries its kernels' time too."""
    if event.device_type.name == "CPU" or getattr(event, "is_user_annotation", False):
        return 0.0
    return float(1e3 * event.self_device_time_total)


def _ops(events: Iterable[Any], on_gpu: bool, runs: int) -> list[ProfiledOp]:
    """By name, the most expensive first."""
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        ns = _device_ns(event) if on_gpu else 0.0 if _is_python(event) else 1e3 * event.self_cpu_time_total
        if ns > 0:
            times[event.name] += ns  # type: ignore[assignment]
            calls[event.name] += 1
    ordered = sorted(times, key=lambda name: (-times[name], name))
    return [ProfiledOp(name=name, num_calls=calls[name], self_ns=times[name] / runs) for name in ordered]


def _stacks(events: Iterable[Any], on_gpu: bool) -> tuple[tuple[tuple[str, ...], int], ...]:
    """Python frames and ops around each op, then the op; its own time on the GPU (kernels launched) or the CPU."""
    times: Counter[tuple[str, ...]] = Counter()
    host_events = [event for event in events if event.device_type.name == "CPU"]
    callers = {event.thread for event in host_events if _is_ours(event.name)}
    for event in host_events:
        ns = 1e3 * (event.self_device_time_total if on_gpu else event.self_cpu_time_total)
        frames = _frames(event, event.thread in callers) if ns > 0 else ()
        if frames:
            times[frames] += round(ns)
    return tuple(sorted(times.items(), key=lambda item: (-item[1], item[0])))


def _frames(event: Any, in_caller: bool) -> tuple[str, ...]:
    """From the outermost frame inside `fn` to the event; empty for what is the profiler's own or this module's.

    `in_caller`: in the thread that called `fn`, so without our frame it is not of `fn`; backward runs in another.
    """
    chain = [event]
    while chain[-1].cpu_parent is not None:
        chain.append(chain[-1].cpu_parent)
    names = [each.name for each in reversed(chain)]
    if not any(_is_python(each) for each in chain):  # a torch that gives frames as text, the innermost first
        names = [*reversed(next((each.stack for each in chain if each.stack), [])), *names]
    ours = [i for i, name in enumerate(names) if _is_ours(name)]
    if ours:
        return tuple(map(_frame, names[ours[0] + 1 :]))
    return () if in_caller else tuple(map(_frame, names))


def _is_ours(name: str) -> bool:
    return _THIS_FILE in name and name.endswith(f": {_call.__name__}")


def _is_python(event: Any) -> bool:
    marked = getattr(event, "is_python_function", None)
    return bool(_PYTHON_FRAME.search(event.name)) if marked is None else bool(marked)


def _frame(text: str) -> str:
    """A frame's name without address, semicolon and line break: the format cuts at those."""
    return " ".join(_ADDRESS.sub("", text).replace(";", ":").split())


def _short(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 3] + "..."
