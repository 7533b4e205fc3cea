"""Checks `launch-bound` and `small-kernels`: the device waits for the host to launch one small kernel after another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from perfdoctor.diagnose.advice import advice
from perfdoctor.diagnose.dependencies import ends_before
from perfdoctor.diagnose.finding import Advice, Finding
from perfdoctor.diagnose.host_time import LAUNCH_PATH_NS
from perfdoctor.diagnose.replay import Edits
from perfdoctor.diagnose.review import Priced, Review
from perfdoctor.diagnose.runs import runs_of
from perfdoctor.record import intervals
from perfdoctor.record.capture import CallKind, Ints, WorkKind
from perfdoctor.units import format_duration, format_plural, format_share

MIN_IDLE_SHARE = 0.10
SMALL_NS = 5_000
MIN_RUN = 20
# From one kernel to the next on a busy stream: 1 to 2 us on an H200, more with memsets between.
KERNEL_GAP_NS = 5_000


def check_launch_bound(review: Review) -> Iterator[Priced]:
    """Idle time in short gaps whose next kernel the host had not launched yet, over a tenth of the step."""
    timeline = review.timeline
    if not review.has_device:
        return
    late = late_launches(review)
    idle = round(intervals.total(intervals.intersect(review.claims.left, late)) / review.num_windows)
    step = _window_ns(review)
    launches = _launches(review)
    if idle < MIN_IDLE_SHARE * step or len(launches) < MIN_RUN * review.num_steps:
        return
    edits = Edits(graphed=frozenset(launches.tolist()))
    headroom = review.headroom(edits)
    lengths = timeline.work.end_ns - timeline.work.start_ns
    kernels = timeline.work.kind == WorkKind.KERNEL
    busiest = review.lines.busiest()
    finding = Finding(
        code="launch-bound",
        severity=review.severity(headroom),
        title=(
            f"the device waits for launches: {review.per_step(len(launches)):.0f} of them{review.a_step}, "
            f"median kernel {format_duration(float(np.median(lengths[kernels])) if kernels.any() else 0)}"
        ),
        kind="launch_bound",
        count=review.per_step(len(launches)),
        gpu_idle_ns=review.claim("launch-bound", late),
        headroom=headroom,
        afterwards=(
            f"{format_share(idle / step)} of the time is gaps before kernels launched too late"
            + (f"; the host was at {busiest}" if busiest else "")
        ),
        basis=review.basis + "; at most: every launch from a CUDA graph",
        advice=_advice(review),
    )
    yield Priced(finding=finding, edits=edits)


def _advice(review: Review) -> Advice:
    first, last = review.call_range
    if (review.timeline.calls.kind[first:last] == CallKind.GRAPH_LAUNCH).any():
        return Advice(text="launch less beside the CUDA graph: take the rest of the step into it, or larger batches")
    return advice(
        "launch less: a CUDA graph (torch.compile mode='reduce-overhead'), larger batches, fused kernels",
        "launch-bound",
    )


def check_small_kernels(review: Review) -> Iterator[Priced]:
    """Long runs of kernels under 5 us that a CUDA graph would launch closer together."""
    if not review.has_device:
        return
    timeline = review.timeline
    runs = _small_runs(review)
    first, last = review.call_range
    calls = np.unique(timeline.call_of_work[runs])
    calls = calls[(calls >= first) & (calls < last) & (timeline.calls.kind[calls] == CallKind.LAUNCH)]
    if len(calls) < MIN_RUN * review.num_steps:
        return
    edits = Edits(graphed=frozenset(calls.tolist()))
    headroom = review.headroom(edits)
    launches = format_plural(round(review.per_step(len(calls))), "launch")
    finding = Finding(
        code="small-kernels",
        severity=review.severity(headroom),
        title=f"{launches}{review.a_step} in long runs of kernels under 5 us",
        kind="launch_bound",
        count=review.per_step(len(calls)),
        headroom=headroom,
        basis=review.basis + "; at most: these launches from a CUDA graph",
        advice=advice("a CUDA graph over this part", "launch-bound"),
    )
    yield Priced(finding=finding, edits=edits)


def _window_ns(review: Review) -> int:
    steps = review.steps
    assert steps is not None
    lengths = (steps.window_end_ns - steps.window_start_ns)[steps.judged]
    return max(round(int(lengths.sum()) / len(lengths)), 1)


def _launches(review: Review) -> Ints:
    first, last = review.call_range
    launches: Ints = first + np.flatnonzero(review.timeline.calls.kind[first:last] == CallKind.LAUNCH)
    return launches


def late_launches(review: Review) -> intervals.Intervals:
    """Before each work that was launched when its stream was already idle: from then until it started.

    Only as far back as a launch path is long: a long pause before a launch is some other work of the host.
    """
    work, launch = review.timeline.work, review.timeline.launch_ns
    late = launch + KERNEL_GAP_NS >= ends_before(review.timeline)
    begins = np.maximum(launch - LAUNCH_PATH_NS, 0)
    return intervals.union(begins[late], work.start_ns[late])


def kernel_gaps(review: Review) -> intervals.Intervals:
    """The short gaps before work launched in time: what it takes a stream to go from one kernel to the next."""
    work = review.timeline.work
    queued = review.timeline.launch_ns < work.start_ns - KERNEL_GAP_NS
    return intervals.union(work.start_ns[queued] - KERNEL_GAP_NS, work.start_ns[queued])


def _small_runs(review: Review) -> Ints:
    """Work rows in runs of at least MIN_RUN kernels under SMALL_NS on one stream, one after another."""
    work = review.timeline.work
    linked = review.timeline.call_of_work >= 0
    chosen: list[Ints] = []
    for stream in np.unique(work.stream):
        rows = np.flatnonzero((work.stream == stream) & linked)
        small: NDArray[np.bool_] = (work.end_ns - work.start_ns)[rows] < SMALL_NS
        small &= work.kind[rows] == WorkKind.KERNEL
        chosen.extend(rows[a:b] for a, b in runs_of(small, shortest=MIN_RUN))
    found: Ints = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
    return found
