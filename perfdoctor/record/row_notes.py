"""What rows lack, whoever recorded them: names, threads, the kernels of launches, an order of the steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.capture import CallKind, Capture, Note, RangeKind, WorkKind
from perfdoctor.units import format_plural


def row_notes(capture: Capture) -> Iterator[Note]:
    """The notes on rows that say less than they should, or more than once."""
    yield from _nameless(capture)
    yield from _threadless(capture)
    yield from _nested_steps(capture)
    yield from _lost_kernels(capture)


def _nameless(capture: Capture) -> Iterator[Note]:
    unknown = [i for i, text in enumerate(capture.strings) if not text]
    count = sum(int(np.isin(table.name, unknown).sum()) for table in (capture.calls, capture.work, capture.ranges))
    if count:
        text = f"{format_plural(count, 'row')} without a name: whether a call waits or a mark is a step is not known"
        yield Note(code="nameless-rows", text=text, count=count)


def _threadless(capture: Capture) -> Iterator[Note]:
    count = sum(int((table.thread == -1).sum()) for table in (capture.calls, capture.ops, capture.ranges))
    if count:
        text = f"{format_plural(count, 'row')} without a thread number: taken to be of one thread of their own"
        yield Note(code="threadless-rows", text=text, count=count)


def _nested_steps(capture: Capture) -> Iterator[Note]:
    count = int((capture.ranges.kind == RangeKind.STEP).sum()) - len(capture.steps)
    if count:
        text = f"{format_plural(count, 'step mark')} left out: inside another step (recorded twice) or around several"
        yield Note(code="nested-steps", text=text, count=count)


def _lost_kernels(capture: Capture) -> Iterator[Note]:
    """Launches without a kernel, but for those before the first that has one (see `launches_without_work`)."""
    calls = capture.calls
    launches = calls.kind == CallKind.LAUNCH
    kernels = capture.work.correlation[capture.work.kind == WorkKind.KERNEL]
    paired = launches & np.isin(calls.correlation, kernels)
    if not paired.any():  # whole graphs only, or no device rows: said by other notes
        return
    lost = launches & ~paired & (calls.start_ns > calls.start_ns[paired].min()) & ~_into_graph(capture)
    lost &= np.isin(calls.thread, calls.thread[paired])  # of a process that was traced
    count = int(lost.sum())
    if count:
        text = f"no kernel row for {format_plural(count, 'launch')}: what looks idle there may not be"
        yield Note(code="lost-kernels", text=text, count=count)


def _into_graph(capture: Capture) -> NDArray[np.bool_]:
    """Calls made while a stream was captured into a CUDA graph: what they launch does not run then."""
    calls = capture.calls
    begins, ends = (
        np.sort(calls.start_ns[capture.matching(lambda text, part=part: part in text)[calls.name]])
        for part in ("StreamBeginCapture", "StreamEndCapture")
    )
    open_at = np.searchsorted(begins, calls.start_ns, "right") - np.searchsorted(ends, calls.start_ns, "right")
    inside: NDArray[np.bool_] = open_at > 0
    return inside
