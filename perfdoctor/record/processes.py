"""Recordings of several processes: whose rows are whose, and the one process that a page is about.

Nsight Systems records all processes under it, and tools merge the traces of ranks into one file. Thread numbers repeat
between processes there, so that they carry the process above their own 24 bits, as Nsight's globalTid does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.capture import Capture, Ints, Note, RangeKind

PROCESS = ~0xFFFFFF  # of a globalTid: hardware, virtual machine and process, without the thread
SEVERAL = "several-processes"
_OF_A_THREAD = ("calls", "ops", "frames", "ranges")


def several_processes(number: int) -> Note:
    """The note on a recording whose calls are of that many processes."""
    text = (
        f"calls of {number} processes are in this recording; this page is of one of them: that whose steps are marked, "
        "else the busiest. Record each rank into a file of its own to compare them."
    )
    return Note(code=SEVERAL, text=text, count=number)


def numbered(process: Ints, thread: Ints) -> Ints:
    """Thread numbers that are unique over processes. Shapes (n,), (n,) -> (n,)."""
    _, index = np.unique(process, return_inverse=True)
    _, own = np.unique(np.stack((process, thread)), axis=1, return_inverse=True)
    numbers: Ints = (index.reshape(-1).astype(np.int64) << 24) | own.reshape(-1)
    return numbers


def of_one_process(capture: Capture) -> Capture:
    """The rows of one process, and the device work that no other process launched; all where there is only one."""
    if not any(note.code == SEVERAL for note in capture.notes):
        return capture
    owner = capture.calls.thread & PROCESS
    processes = np.unique(owner)
    if len(processes) < 2:
        return capture
    marked = _marked(capture, processes)
    chosen = _busiest(capture, owner, processes) if marked is None else marked
    foreign = np.isin(capture.work.correlation, capture.calls.correlation[owner != chosen])
    foreign &= ~np.isin(capture.work.correlation, capture.calls.correlation[owner == chosen])
    kept = {name: getattr(capture, name).take(_of(capture, name, chosen)) for name in _OF_A_THREAD}
    return replace(capture, work=capture.work.take(~foreign), **kept)


def _of(capture: Capture, table: str, process: int) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = (getattr(capture, table).thread & PROCESS) == process
    return mask


def _marked(capture: Capture, processes: Ints) -> int | None:
    """The process whose ranges are the steps; None where none of these marked any."""
    marks = capture.ranges.thread[capture.ranges.kind == RangeKind.STEP] & PROCESS
    marks = marks[np.isin(marks, processes)]
    return int(marks[0]) if len(marks) else None


def _busiest(capture: Capture, owner: Ints, processes: Ints) -> int:
    """The process that gave the devices most to do; of those that gave nothing the one with most calls."""
    work = capture.work
    shares = [
        (
            int((work.end_ns - work.start_ns)[np.isin(work.correlation, capture.calls.correlation[mine])].sum()),
            int(mine.sum()),
        )
        for mine in (owner == process for process in processes)
    ]
    return int(processes[shares.index(max(shares))])
