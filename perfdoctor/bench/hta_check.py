"""Busy and idle time of every step against HolisticTraceAnalysis, where that is installed and can read the file."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record import intervals
from perfdoctor.record.capture import Capture

Ints = NDArray[np.int64]

_WORK = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"}
_HOST = {"cpu_op", "user_annotation", "Operator"}
_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)$")


def check_hta(path: Path, capture: Capture) -> list[str] | None:
    """Differences in busy and idle ns, of the whole and of each step's work. None where HTA is missing or fails.

    Both sides are unions over all streams of one device; the work of a step is what calls inside it launched. HTA's
    rows, its times and its links are used, with three of its habits put right: it rounds times to microseconds (an
    option), counts `cuda_sync` rows as device work, and takes the GPU rows of ProfilerStep for steps as well.
    """
    if importlib.util.find_spec("hta") is None or len(np.unique(capture.work.device)) != 1:
        return None
    loaded = _load(path)
    if loaded is None:
        return None
    frame, categories, names = loaded
    start = _nanoseconds(frame["ts"].to_numpy())
    end = start + _nanoseconds(frame["dur"].to_numpy())
    is_work = np.isin(frame["cat"].to_numpy(), [i for i, text in enumerate(categories) if text in _WORK])
    is_work &= frame["stream"].to_numpy() != -1
    problems = _compare("whole", capture.work.start_ns, capture.work.end_ns, start[is_work], end[is_work])
    launched = _launch_times(frame, start)
    is_host = np.isin(frame["cat"].to_numpy(), [i for i, text in enumerate(categories) if text in _HOST])
    for row in np.flatnonzero(is_host):
        step = _STEP.match(names[int(frame["name"].iloc[row])])
        if step:
            theirs = is_work & (launched >= start[row]) & (launched < end[row])
            ours = _work_of_step(capture, int(step[1]))
            problems += _compare(f"step {step[1]}", *ours, start[theirs], end[theirs])
    return problems


def _load(path: Path) -> tuple[Any, list[str], list[str]] | None:
    """HTA's table of the file and its symbols; None where HTA cannot read it."""
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    logging.disable(logging.CRITICAL)
    try:
        from hta.common.trace import Trace  # type: ignore[import-untyped]

        trace = Trace(trace_files={0: str(path.absolute())}, trace_dir="/")
        trace.parse_traces(use_multiprocessing=False, use_memory_profiling=False)
        frame, symbols = trace.get_trace(0), trace.symbol_table.get_sym_table()
        return (frame, symbols, symbols) if "index_correlation" in frame.columns else None
    except Exception:  # whatever HTA dies of, it is no judge of this file
        return None
    finally:
        logging.disable(logging.NOTSET)


def _launch_times(frame: Any, start: Ints) -> Ints:
    """The start of the call that launched each row, -1 where HTA links none."""
    position = dict(zip(frame.index.tolist(), range(len(frame)), strict=True))
    links = frame["index_correlation"].to_numpy()
    return np.array([start[position[link]] if link > 0 else -1 for link in links.tolist()], np.int64)


def _work_of_step(capture: Capture, index: int) -> tuple[Ints, Ints]:
    row = int(np.flatnonzero(capture.steps.index == index)[0])
    calls = capture.calls
    inside = (calls.start_ns >= capture.steps.start_ns[row]) & (calls.start_ns < capture.steps.end_ns[row])
    work = capture.work.take(np.isin(capture.work.correlation, calls.correlation[inside]))
    return work.start_ns, work.end_ns


def _nanoseconds(microseconds: NDArray[Any]) -> Ints:
    whole: Ints = np.floor(microseconds).astype(np.int64)
    fraction: Ints = np.rint((microseconds - whole) * 1000).astype(np.int64)
    return whole * 1000 + fraction


def _compare(what: str, start: Ints, end: Ints, hta_start: Ints, hta_end: Ints) -> list[str]:
    ours, theirs = _busy_idle(start, end), _busy_idle(hta_start, hta_end)
    return [] if ours == theirs else [f"{what}: busy, idle {ours} ns, HTA has {theirs}"]


def _busy_idle(start: Ints, end: Ints) -> tuple[int, int]:
    busy = intervals.union(start, end)
    if not len(busy[0]):
        return 0, 0
    return intervals.total(busy), int(busy[1][-1] - busy[0][0]) - intervals.total(busy)
