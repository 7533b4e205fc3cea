"""Checks `pageable-copy` and `blocking-copy`: copies to the device that hold the host back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from perfdoctor.diagnose.attribution import SyncGroup
from perfdoctor.diagnose.finding import Advice, Finding
from perfdoctor.diagnose.hit_counts import HitCount, hit_counts
from perfdoctor.diagnose.host_sync import code_of, finding_from_hits, idle_after, what_followed, worst
from perfdoctor.diagnose.line_advice import advice_at
from perfdoctor.diagnose.replay import Edits
from perfdoctor.diagnose.review import Priced, Review
from perfdoctor.diagnose.ruled_out import has
from perfdoctor.record import intervals
from perfdoctor.record.capture import CallKind, Site
from perfdoctor.record.sync_kinds import BLOCKING_COPY, KINDS, PAGEABLE_COPY
from perfdoctor.units import format_bytes

# Pinned copies to a device by its generation, bytes/s: an H200 over PCIe 5 measured 51.4e9; half, a generation back.
_PINNED_BY_CAPABILITY = (("12.", 51e9), ("10.", 51e9), ("9.", 51e9), ("8.", 25e9), ("7.", 12e9))
_PINNED_BY_NAME = (("H200", 51e9), ("H100", 51e9), ("B200", 51e9), ("A100", 25e9), ("V100", 12e9), ("T4", 12e9))
# Of pinned over pageable speed on an H200 (51.4 against 15.8 GB/s), where the device is not known.
_PINNED_GAIN = 3.2


def check_copies(review: Review) -> Iterator[Priced]:
    """Copies from pageable memory, and copies that the host waits for though it need not."""
    counted = {(count.kind, count.place): count for count in hit_counts(review.capture)}
    for group in review.sync_groups:
        if code_of(group.kind) in (PAGEABLE_COPY, BLOCKING_COPY):
            count = counted.pop((group.kind, group.place), None) if group.place else None
            if count is not None and not count.regular:
                yield _from_hits(review, count)
            else:
                yield _copy_finding(review, group)
    for count in counted.values():
        if code_of(count.kind) in (PAGEABLE_COPY, BLOCKING_COPY):
            yield _from_hits(review, count)


def _from_hits(review: Review, count: HitCount) -> Priced:
    priced = finding_from_hits(review, count)
    return replace(priced, finding=replace(priced.finding, advice=_advice(review, count.kind, count.place)))


def _advice(review: Review, kind: str, place: Site | None) -> Advice:
    """The advice of the line; where it is to have the loader pin, and that pins already, what else to do."""
    found = advice_at(kind, place)
    pinned = review.capture.environment.pin_memory or has(review.capture, "prefetch")
    if kind != "h2d_pageable" or not pinned or not any("DataLoader" in line for line in found.lines):
        return found
    return Advice(
        text="the loader pins its batches already, and this tensor is none of them: make it on the device, or pin it "
        "where it is made (a batch class of your own needs a pin_memory() method)",
        lines=("x = torch.empty(shape, pin_memory=True)   # or made pinned", "x = x.to(device, non_blocking=True)"),
    )


_SPEED_BYTES = 65_536


def _copy_finding(review: Review, group: SyncGroup) -> Priced:
    timeline = review.timeline
    code = code_of(group.kind)
    held = np.array(group.calls, np.int64)
    copies = held[timeline.calls.kind[held] == CallKind.MEMCPY]
    copies = np.union1d(copies, np.array(group.copies, np.int64))
    edits, low, high = _edits(review, group, copies.tolist())
    headroom = review.headroom(edits, low, high)
    first, order = timeline.works_of_call
    rows = np.concatenate([order[first[i] : first[i + 1]] for i in copies.tolist()]) if len(copies) else copies
    size = int(timeline.work.num_bytes[rows].clip(0).sum())
    busy = int((timeline.work.end_ns[rows] - timeline.work.start_ns[rows]).sum())
    rate = f"{format_bytes(size / review.num_steps)}{review.a_step}"
    # Small copies take their latency: bytes over time is no speed of theirs.
    speed = f" at {format_bytes(size / max(busy, 1) * 1e9)}/s" if size >= _SPEED_BYTES * max(len(copies), 1) else ""
    shadows = intervals.merge(
        idle_after(review, held),
        intervals.union(timeline.calls.start_ns[copies], timeline.calls.end_ns[copies]),
    )
    finding = Finding(
        code=code,
        severity=review.severity(headroom),
        title=f"{KINDS[group.kind].phrase} ({rate}{speed})" if size else KINDS[group.kind].phrase,
        kind=group.kind,
        site=group.place,
        count=review.per_step(len(copies)),
        count_per_micro_batch=review.per_micro_batch(len(copies)),
        host_blocked_ns=round(
            int((timeline.calls.end_ns[held] - timeline.calls.start_ns[held]).sum()) / review.num_steps
        ),
        gpu_idle_ns=review.claim(code, shadows),
        headroom=headroom,
        afterwards=what_followed(review, held, group.place),
        basis=review.basis,
        advice=_advice(review, group.kind, group.place),
        evidence=worst(timeline.calls.start_ns[held], timeline.calls.end_ns[held]),
    )
    return Priced(finding=finding, edits=edits)


def _edits(review: Review, group: SyncGroup, copies: list[int]) -> tuple[Edits, Edits, Edits]:
    """Pinned and asynchronous; at least asynchronous; at most hidden behind the step before (or made on the device)."""
    unblocked = frozenset(group.calls)
    if group.kind == "h2d_blocking" and code_of(group.kind) == BLOCKING_COPY and _is_constant(review, copies):
        # A constant made on the device, once: the copy and the wait are gone, what led to them mostly stays.
        gone = Edits(unblocked=unblocked, muted=frozenset(copies))
        return gone, Edits(unblocked=unblocked), gone
    scales = {call: scale for call in copies if (scale := _pinned_scale(review, call)) < 1}
    return (
        Edits(unblocked=unblocked, work_scale=scales),
        Edits(unblocked=unblocked),
        Edits(unblocked=unblocked, work_scale=dict.fromkeys(copies, 0.0)),
    )


def _is_constant(review: Review, copies: list[int]) -> bool:
    first, order = review.timeline.works_of_call
    sizes = [review.timeline.work.num_bytes[order[first[i] : first[i + 1]]].sum() for i in copies]
    return bool(sizes) and max(sizes) < 65_536


def _pinned_scale(review: Review, call: int) -> float:
    """Device time of the copy from pinned memory over that recorded."""
    first, order = review.timeline.works_of_call
    rows = order[first[call] : first[call + 1]]
    work = review.timeline.work
    size, busy = int(work.num_bytes[rows].sum()), int((work.end_ns[rows] - work.start_ns[rows]).sum())
    if size <= 0 or busy <= 0:
        return 1 / _PINNED_GAIN
    speed = pinned_bytes_per_s(review)
    return min(size / speed * 1e9 / busy, 1.0) if speed else 1 / _PINNED_GAIN


def pinned_bytes_per_s(review: Review) -> float | None:
    """How fast this device takes pinned memory: measured, or by its generation; None where neither is known."""
    environment = review.capture.environment
    if environment.pinned_h2d_bytes_per_s:
        return float(environment.pinned_h2d_bytes_per_s)
    for prefix, speed in _PINNED_BY_CAPABILITY:
        if environment.compute_capability.startswith(prefix):
            return speed
    for name, speed in _PINNED_BY_NAME:
        if name in environment.gpu:
            return speed
    return None
