"""Checks `allocator` and `garbage-collection`: pauses of the host that have nothing to do with the model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from perfdoctor.diagnose.advice import advice, advice_for_kind
from perfdoctor.diagnose.finding import Advice, Finding, Severity
from perfdoctor.diagnose.hit_counts import HitCount, hit_counts
from perfdoctor.diagnose.host_sync import worst
from perfdoctor.diagnose.replay import Edits
from perfdoctor.diagnose.review import Priced, Review
from perfdoctor.diagnose.ruled_out import has
from perfdoctor.record import intervals
from perfdoctor.record.capture import CallKind, Ints
from perfdoctor.record.intervals import Intervals
from perfdoctor.record.sync_kinds import ALLOCATOR, GARBAGE_COLLECTION
from perfdoctor.record.timeline import step_index
from perfdoctor.units import format_ms, format_plural

_SELDOM = 0.1  # gc.collect() calls a step: at most every tenth step


def check_allocator(review: Review) -> Iterator[Priced]:
    """cudaMalloc and cudaFree in steady state, and `empty_cache` that brings them about."""
    calls = review.timeline.calls
    first, last = review.call_range
    index = np.arange(first, last)
    held = index[np.isin(calls.kind[index], (CallKind.MALLOC, CallKind.FREE))]
    emptied = [count for count in hit_counts(review.capture) if count.kind == "empty_cache" and count.regular]
    if not emptied and not _in_steady_state(review, calls.start_ns[held]):
        return
    edits = Edits(muted=frozenset(held.tolist()))
    headroom = review.headroom(edits) if len(held) else None
    spans = intervals.union(calls.start_ns[held], calls.end_ns[held])
    kind = "empty_cache" if emptied else "cuda_malloc"
    finding = Finding(
        code=ALLOCATOR,
        severity=review.severity(headroom),
        title=_allocator_title(kind, review.per_step(len(held)), review.a_step),
        kind=kind,
        site=emptied[0].place if emptied else None,
        count=emptied[0].per_step if emptied else review.per_step(len(held)),
        host_blocked_ns=round(intervals.total(spans) / review.num_steps) if len(held) else None,
        gpu_idle_ns=review.claim(ALLOCATOR, spans) if review.has_device else None,
        headroom=headroom,
        withheld="" if headroom else review.unpriced,
        basis=review.basis if len(held) else "live hooks",
        advice=advice_for_kind(kind),
        evidence=worst(calls.start_ns[held], calls.end_ns[held]),
    )
    yield Priced(finding=finding, edits=edits if len(held) else None)


def _in_steady_state(review: Review, times: Ints) -> bool:
    """Whether something happens in at least half of the steps; in an unmarked window, also in its second half."""
    steps = review.steps
    if steps is None or not len(times):
        return False
    if not steps.known:
        middle = (int(steps.host_start_ns[0]) + int(steps.host_end_ns[0])) // 2
        return bool(4 * (times > middle).sum() >= len(times))
    return 2 * len(np.unique(step_index(steps.host_start_ns, times))) >= len(steps)


def _allocator_title(kind: str, number: float, a_step: str) -> str:
    calls = f"{number:.3g} cudaMalloc/cudaFree{a_step}"
    if kind == "empty_cache":
        return f"torch.cuda.empty_cache() in the loop: {calls}" if number else "torch.cuda.empty_cache() in the loop"
    # Without steps nobody knows whether the loop was warm.
    return f"the allocator goes to the driver{' in steady state' if a_step else ''}: {calls}"


def check_garbage_collection(review: Review) -> Iterator[Priced]:
    """Python's collector inside the steps: each line that calls it, and what it does by itself."""
    spans = _collections(review)
    for count in hit_counts(review.capture):
        if count.kind == "python_gc":
            own = intervals.intersect(spans, _collections_at(review, count))
            spans = intervals.subtract(spans, own)
            yield _explicit(review, count, own)
    per_step = intervals.total(spans) / review.num_steps
    if per_step >= 0.01 * max(review.pricing.reference_ns, 1):
        yield _automatic(review, spans)


def _collections(review: Review, generation: str = "") -> Intervals:
    """When the collector ran inside the steps."""
    pauses = review.capture.pauses
    if not len(pauses):
        return intervals.EMPTY
    rows = pauses.take(review.capture.matching(lambda name: name.startswith(f"gc:{generation}"))[pauses.name])
    return review.inside_steps(intervals.union(rows.start_ns, rows.end_ns))


def _collections_at(review: Review, count: HitCount) -> Intervals:
    """When the line of `count` had it run, in every phase."""
    capture = review.capture
    hits = capture.hits.take(capture.hits.site == capture.sites.index(count.place))
    hits = hits.take(capture.matching(lambda text: text == count.kind)[hits.kind])
    return intervals.union(hits.start_ns, hits.end_ns)


def _automatic(review: Review, spans: Intervals) -> Priced:
    edits = Edits(host_saved_ns=review.saved_by(spans))
    headroom = review.headroom(edits)
    oldest = len(intervals.intersect(spans, _collections(review, "2"))[0])
    longest = int((spans[1] - spans[0]).max())
    finding = Finding(
        code=GARBAGE_COLLECTION,
        severity=review.severity(headroom),
        title=(
            f"Python's garbage collector runs inside the steps "
            f"({format_plural(oldest, 'full collection')}, longest {format_ms(longest)})"
        ),
        kind="python_gc",
        count=review.per_step(len(spans[0])),
        host_blocked_ns=round(intervals.total(spans) / review.num_steps),
        gpu_idle_ns=review.claim(GARBAGE_COLLECTION, spans) if review.has_device else None,
        headroom=headroom,
        withheld="" if headroom else review.unpriced,
        basis=review.basis,
        advice=_collector_advice(review),
        evidence=worst(*spans),
    )
    return Priced(finding=finding, edits=edits)


def _collector_advice(review: Review) -> Advice:
    if has(review.capture, "gc_frozen"):
        text = "objects are frozen already: make fewer new ones in a step, or let the collector run less often"
        return advice(text, "gc-threshold")
    return advice("move long-lived objects out of the collector's sight after warm-up", "garbage-collection")


def _explicit(review: Review, count: HitCount, spans: Intervals) -> Priced:
    """`spans`: the recorded collections of this line; there may be none, where it was caught in another phase."""
    edits = Edits(host_saved_ns=review.saved_by(spans)) if len(spans[0]) else None
    headroom = review.headroom(edits) if edits is not None else None
    finding = Finding(
        code=GARBAGE_COLLECTION,
        severity=review.severity(headroom) if count.per_step >= _SELDOM else Severity.MINOR,
        title="gc.collect() in the loop",
        kind="python_gc",
        site=count.place,
        count=count.per_step,
        host_blocked_ns=round(intervals.total(spans) / review.num_steps) if edits is not None else count.blocked_ns,
        gpu_idle_ns=review.claim(GARBAGE_COLLECTION, spans) if edits is not None and review.has_device else None,
        headroom=headroom,
        withheld="" if headroom else review.unpriced,
        basis=review.basis if headroom else "live hooks",
        advice=advice("collect every 1000 steps, or let Python do it", "gc-collect"),
        evidence=worst(*spans) if edits is not None else (),
    )
    return Priced(finding=finding, edits=edits)
