"""Checks `host-sync` and `unsynchronised-read`: lines at which the host waits for the device, or should."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from perfdoctor.diagnose.attribution import SyncGroup
from perfdoctor.diagnose.dependencies import sync_targets
from perfdoctor.diagnose.finding import Finding, Severity
from perfdoctor.diagnose.hit_counts import HitCount, hit_counts
from perfdoctor.diagnose.line_advice import advice_at
from perfdoctor.diagnose.replay import Edits
from perfdoctor.diagnose.review import Priced, Review
from perfdoctor.record import intervals
from perfdoctor.record.capture import CallKind, Ints, Site
from perfdoctor.record.intervals import Intervals
from perfdoctor.record.sync_kinds import HOST_SYNC, KINDS, UNSYNCHRONISED_READ
from perfdoctor.record.timeline import SYNCS
from perfdoctor.units import format_ms

# Below this the host only went on to its next launch.
_SHORT_NS = 500_000
_NOT_RECORDED = "caught by the hooks, not found in the recorded steps: what it costs is not known"
_NO_DEVICE = "no device recording: what it costs needs a GPU"


def check_host_sync(review: Review) -> Iterator[Priced]:
    """Every line whose reads or waits hold the host back, priced by replay where there is a device recording."""
    counted = {(count.kind, count.place): count for count in hit_counts(review.capture)}
    for group in review.sync_groups:
        if code_of(group.kind) == HOST_SYNC and group.kind != "anomaly_check":
            count = counted.pop((group.kind, group.place), None) if group.place else None
            yield from _from_recording(review, group, count)
    for count in counted.values():
        if code_of(count.kind) == HOST_SYNC and count.kind != "anomaly_check":
            yield finding_from_hits(review, count)


def check_unsynchronised_read(review: Review) -> Iterator[Priced]:
    """Reads of an asynchronous copy before it has arrived: an error, whatever it costs."""
    for count in hit_counts(review.capture):
        if code_of(count.kind) == UNSYNCHRONISED_READ:
            finding = Finding(
                code=UNSYNCHRONISED_READ,
                severity=Severity.ERROR,
                title=KINDS[count.kind].phrase,
                kind=count.kind,
                site=count.place,
                count=count.per_step,
                basis="live hooks",
                advice=advice_at(count.kind, count.place),
            )
            yield Priced(finding=finding)


def code_of(kind: str) -> str:
    """The finding code of a kind; unknown kinds are syncs."""
    return KINDS[kind].code if kind in KINDS else HOST_SYNC


def phrase_of(kind: str) -> str:
    """What a kind does, in words; a kind that this version does not know is a wait."""
    return KINDS.get(kind, KINDS["other_sync"]).phrase


def _returning_copies(review: Review, held: Ints) -> int:
    """Copies to pageable memory with a sync right after them: the two calls are one wait (`.cpu()`)."""
    kind = review.timeline.calls.kind
    copies = held[kind[held] == CallKind.MEMCPY]
    following = held[np.isin(kind[held], SYNCS)]
    return int(np.isin(copies + 1, following).sum())


def _from_recording(review: Review, group: SyncGroup, count: HitCount | None) -> Iterator[Priced]:
    calls = review.timeline.calls
    held = np.array(group.calls, np.int64)
    if count is not None and not count.regular:
        yield finding_from_hits(review, count)
        return
    edits = Edits(unblocked=frozenset(group.calls))
    headroom = review.headroom(edits)
    waits = len(held) - _returning_copies(review, held)
    shadows = idle_after(review, held)
    finding = Finding(
        code=HOST_SYNC,
        severity=review.severity(headroom),
        title=phrase_of(group.kind),
        kind=group.kind,
        site=group.place,
        count=count.per_step if count is not None else review.per_step(waits),
        count_per_micro_batch=review.per_micro_batch(waits),
        host_blocked_ns=round(int((calls.end_ns[held] - calls.start_ns[held]).sum()) / review.num_steps),
        gpu_idle_ns=review.claim(HOST_SYNC, shadows),
        headroom=headroom,
        afterwards=what_followed(review, held, group.place),
        basis=review.basis,
        advice=advice_at(group.kind, group.place),
        evidence=worst(calls.start_ns[held], calls.end_ns[held]),
    )
    yield Priced(finding=finding, edits=edits)


def finding_from_hits(review: Review, count: HitCount) -> Priced:
    rare = not count.regular
    finding = Finding(
        code=code_of(count.kind),
        severity=Severity.MINOR if rare else Severity.COST,
        title=phrase_of(count.kind),
        kind=count.kind,
        site=count.place,
        count=count.per_step,
        count_per_micro_batch=_per_micro_batch(review, count.per_step),
        host_blocked_ns=count.blocked_ns,
        withheld="not in every step" if rare else _NOT_RECORDED if review.has_device else _NO_DEVICE,
        basis="live hooks",
        advice=advice_at(count.kind, count.place),
    )
    return Priced(finding=finding)


def _per_micro_batch(review: Review, per_step: float) -> float | None:
    steps = review.steps
    return per_step / steps.micro_batches if steps is not None and steps.micro_batches > 1 else None


def idle_after(review: Review, held: Ints) -> Intervals:
    """From when the device ran dry in each wait until it had work again that was launched after the wait."""
    timeline = review.timeline
    calls, work = timeline.calls, timeline.work
    if not len(work):
        return intervals.EMPTY
    targets = sync_targets(timeline)
    order = np.argsort(timeline.launch_ns, kind="stable")
    launched = timeline.launch_ns[order]
    # Work is launched in order, but streams may start it out of order: the earliest start of all that came later.
    starts = np.minimum.accumulate(work.start_ns[order][::-1])[::-1]
    begins = np.array([_ran_dry(review, i, targets.get(i, -1)) for i in held.tolist()], np.int64)
    following = np.searchsorted(launched, calls.end_ns[held])
    known = following < len(starts)
    ends = np.where(known, starts[np.minimum(following, len(starts) - 1)], begins)
    return intervals.union(begins, ends)


def _ran_dry(review: Review, call: int, target: int) -> int:
    calls, work = review.timeline.calls, review.timeline.work
    return max(int(work.end_ns[target]), int(calls.start_ns[call])) if target >= 0 else int(calls.start_ns[call])


def what_followed(review: Review, held: Ints, place: Site | None) -> str:
    """What the host did between the wait and its next launch, in words: the price of the wait."""
    calls = review.timeline.calls
    launches = np.flatnonzero((calls.kind == CallKind.LAUNCH) | (calls.kind == CallKind.GRAPH_LAUNCH))
    following = np.searchsorted(launches, held)
    known = following < len(launches)
    if not known.any():
        return "nothing was launched after it"
    next_launch = launches[following[known]]
    gaps = calls.start_ns[next_launch] - calls.end_ns[held[known]]
    usual = int(np.median(np.maximum(gaps, 0)))
    doing = _named(review, int(calls.end_ns[held[known][0]]), int(calls.start_ns[next_launch[0]]))
    line = review.lines.after(place) if place is not None and usual > _SHORT_NS else None
    if line is not None:
        doing = f" (mostly at {line.frame}: {line.text})" if line.text else f" (mostly at {line.frame})"
    if np.isin(calls.kind[np.minimum(held + 1, len(calls) - 1)], SYNCS).all() and len(held) > 1:
        return "another wait followed"
    return f"the host worked {format_ms(usual)} before its next launch{doing}"


def _named(review: Review, start: int, end: int) -> str:
    """The range or pause that fills most of `[start, end)`, where the recording names one."""
    best, name = 0, ""
    capture = review.capture
    for table in (capture.pauses, capture.ranges):
        for begin, stop, text in zip(table.start_ns.tolist(), table.end_ns.tolist(), table.name.tolist(), strict=True):
            overlap = min(stop, end) - max(begin, start)
            inside = begin >= start - (end - start) and stop <= end + (end - start)
            if inside and overlap > best:
                best, name = overlap, capture.text(text)
    return f" ({name})" if best > 0.5 * (end - start) else ""


def worst(starts: Ints, ends: Ints, number: int = 3) -> tuple[tuple[int, int], ...]:
    """The longest time ranges, longest first."""
    order = np.argsort(starts - ends, kind="stable")[:number]
    return tuple((int(starts[i]), int(ends[i])) for i in order)
