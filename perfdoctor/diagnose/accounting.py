"""Where a step's time on the device's timeline goes, so that the parts add up to the nanosecond.

A step's window runs from the end of the previous step's device work to the end of its own. Inside it the device is busy
(the union over its streams) or idle; idle time is claimed by causes in a fixed order, and what one has claimed no other
can claim again. What nobody claims is `unexplained` and printed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from perfdoctor.diagnose.finding import Accounting
from perfdoctor.record import intervals
from perfdoctor.record.capture import Ints, WorkKind
from perfdoctor.record.intervals import Intervals
from perfdoctor.record.kernel_names import KernelClass, kernel_class
from perfdoctor.record.timeline import Timeline


@dataclass(slots=True)
class IdleClaims:
    """The idle time of the windows, and who claimed what of it. The only mutable state of a diagnosis."""

    idle: Intervals
    left: Intervals
    by_code: dict[str, Intervals] = field(default_factory=dict)

    def claim(self, code: str, causes: Intervals) -> Intervals:
        """Give `code` the part of the still unclaimed idle time inside `causes`; returns that part."""
        taken = intervals.intersect(self.left, causes)
        self.left = intervals.subtract(self.left, taken)
        self.by_code[code] = intervals.merge(self.by_code.get(code, intervals.EMPTY), taken)
        return taken


def idle_claims(timeline: Timeline) -> IdleClaims:
    """All idle time inside the windows of the steps, unclaimed."""
    window = windows(timeline)
    idle = intervals.subtract(window, timeline.busy)
    return IdleClaims(idle, idle)


def windows(timeline: Timeline) -> Intervals:
    """The device windows of the steps as one set; empty without device work.

    A first window that begins with the first work recorded is left out: it lacks the idle time before that.
    """
    steps = timeline.steps
    if steps is None or not len(timeline.work):
        return intervals.EMPTY
    return intervals.union(steps.window_start_ns[steps.judged], steps.window_end_ns[steps.judged])


def account(timeline: Timeline, claims: IdleClaims) -> Accounting | None:
    """The sums, as means over the steps; None where the recording holds no device work."""
    window = windows(timeline)
    if timeline.steps is None or not len(window[0]):
        return None
    steps = timeline.steps.num_judged
    busy = intervals.intersect(timeline.busy, window)
    by_class = _busy_by_class(timeline, window)
    compute = intervals.merge(by_class[KernelClass.MATRIX], by_class[KernelClass.OTHER])
    matrix = by_class[KernelClass.MATRIX]
    bandwidth = intervals.subtract(by_class[KernelClass.OTHER], matrix)
    communication = intervals.subtract(by_class[KernelClass.COMMUNICATION], compute)
    copies = intervals.subtract(by_class["copy"], intervals.merge(compute, by_class[KernelClass.COMMUNICATION]))

    def mean(part: Intervals) -> int:
        return round(intervals.total(part) / steps)

    delay = timeline.launch_delay_ns
    return Accounting(
        window_ns=mean(window),
        busy_ns=mean(busy),
        idle_by_code={code: mean(taken) for code, taken in claims.by_code.items() if intervals.total(taken)},
        unexplained_ns=mean(claims.left),
        matrix_ns=mean(matrix),
        bandwidth_ns=mean(bandwidth),
        copy_ns=mean(copies),
        communication_ns=mean(communication),
        run_ahead_ns=int(np.median(delay)) if len(delay) else 0,
    )


def _busy_by_class(timeline: Timeline, window: Intervals) -> dict[str, Intervals]:
    """Busy time inside the windows by what ran: overlapping classes overlap here too."""
    work = timeline.work
    names = np.array([_class_of(name) for name in timeline.capture.strings], dtype=object)
    classes = names[work.name] if len(work) else np.empty(0, object)
    classes = np.where(np.isin(work.kind, (WorkKind.MEMCPY, WorkKind.MEMSET)), "copy", classes)
    return {
        key: intervals.intersect(_union(work.start_ns, work.end_ns, classes == key), window)
        for key in (KernelClass.MATRIX, KernelClass.OTHER, KernelClass.COMMUNICATION, "copy")
    }


def _class_of(name: str) -> str:
    """Matrix, communication, or everything else that moves memory."""
    found = kernel_class(name)
    return found if found in (KernelClass.MATRIX, KernelClass.COMMUNICATION) else KernelClass.OTHER


def _union(starts: Ints, ends: Ints, chosen: np.ndarray) -> Intervals:  # type: ignore[type-arg]
    return intervals.union(starts[chosen], ends[chosen])
