"""Checks `data-wait` and `worker-respawn`: the host waiting for the next batch."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from perfdoctor.diagnose.advice import advice, loader_lines, workers_for
from perfdoctor.diagnose.finding import Advice, Finding, Headroom, Severity
from perfdoctor.diagnose.host_sync import worst
from perfdoctor.diagnose.replay import Edits
from perfdoctor.diagnose.review import Priced, Review
from perfdoctor.diagnose.ruled_out import has
from perfdoctor.record import intervals
from perfdoctor.record.capture import Site
from perfdoctor.record.intervals import Intervals
from perfdoctor.record.note_codes import WITHOUT_CUDA
from perfdoctor.units import format_ms, format_plural, format_share

_LOADER = re.compile(r"enumerate\(DataLoader\)|_(SingleProcess|MultiProcessing)DataLoaderIter|^data$|^dataloader", re.I)
# Parts of a fetch in the training process, by the function that a trace with Python frames names.
_PARTS = (
    ("fetch", re.compile(r"__getitems?__$")),
    ("collate", re.compile(r"\bdefault_collate$|: collate(_fn)?$")),
    ("pin", re.compile(r"pin_memory$")),
)
MIN_SHARE = 0.01
CLEAR_SHARE = 0.05  # a shorter wait that gives nothing back is a loader that keeps up


def check_data_wait(review: Review) -> Iterator[Priced]:
    """Time in the loader, where it exceeds 1 % of the step and gives something back, or 5 %."""
    waits = loader_waits(review)
    if not len(waits[0]):
        if review.capture.bare is None or not review.capture.bare.data_ns.any():
            review.skip("data-wait", "no mark of the loader in the recording (no DataLoader range, no session.batches)")
        return
    buffered = _buffered_steps(review)
    if buffered >= review.num_steps and review.steps is not None and review.steps.known:
        review.skip(
            "data-wait",
            f"the loader had {format_plural(buffered, 'batch')} ready (workers x prefetch_factor) and the window holds "
            f"only {format_plural(review.num_steps, 'step')}: record more than {buffered}",
        )
        return
    respawns = intervals.merge(_worker_starts(review), _first_waits(review))  # told by check_worker_respawn
    waits = intervals.subtract(_after_buffer(review, waits, buffered), respawns)
    judged = review.num_steps - buffered
    per_step = round(intervals.total(waits) / judged)
    if per_step < MIN_SHARE * max(review.pricing.reference_ns, 1):
        return
    edits = Edits(host_saved_ns=review.saved_by(waits))
    # The steps that used up the buffer waited for nothing: what the others waited is theirs alone.
    share = review.num_steps / judged
    headroom = _scaled(review.headroom(edits), share)
    if per_step < CLEAR_SHARE * review.pricing.reference_ns and review.severity(headroom) == Severity.MINOR:
        return
    finding = Finding(
        code="data-wait",
        severity=review.severity(headroom),
        title=f"the host waits for the next batch{_split(review, waits)}",
        kind="dataloader_wait",
        site=_site(review),
        count=len(waits[0]) / judged,
        host_blocked_ns=per_step,
        gpu_idle_ns=round(share * review.claim("data-wait", waits)) if review.has_device else None,
        headroom=headroom,
        withheld="" if headroom is not None else review.unpriced,
        basis=review.basis,
        advice=_advice(review),
        evidence=worst(*waits),
    )
    yield Priced(finding=finding, edits=edits)


def _scaled(headroom: Headroom | None, share: float) -> Headroom | None:
    if headroom is None:
        return None
    low, mid, high = (round(share * each) for each in (headroom.low_ns, headroom.mid_ns, headroom.high_ns))
    return Headroom(low_ns=low, mid_ns=mid, high_ns=high)


def loader_waits(review: Review) -> Intervals:
    """Host time inside the loader, within the steps."""
    capture = review.capture
    named = capture.matching(_LOADER.search)
    found = intervals.EMPTY
    for table in (capture.pauses, capture.ranges, capture.ops):
        if len(table) and len(named):
            chosen = named[table.name]
            found = intervals.merge(found, intervals.union(table.start_ns[chosen], table.end_ns[chosen]))
    return review.inside_steps(found)


def _buffered_steps(review: Review) -> int:
    """Steps whose batches were ready before the window: an unfinished epoch hides its loader behind them."""
    environment = review.capture.environment
    workers = environment.num_workers or 0
    batches = workers * (environment.prefetch_factor or 2)
    steps = review.steps
    per_step = max(steps.micro_batches, 1.0) if steps is not None else 1.0
    # A live session reaches its light window after many steps: the buffer is long used up.
    started = int(review.capture.steps.index[0]) if len(review.capture.steps) and steps and steps.known else 0
    return max(int(np.ceil(batches / per_step)) - started, 0) if workers and steps and steps.known else 0


def _after_buffer(review: Review, waits: Intervals, buffered: int) -> Intervals:
    if not buffered or review.steps is None:
        return waits
    return intervals.clip(waits, int(review.steps.host_start_ns[buffered]), int(review.steps.host_end_ns[-1]))


def _split(review: Review, waits: Intervals) -> str:
    """': fetch 80 %, collate 15 %' where Python frames tell; '' else."""
    frames = review.capture.frames
    if not len(frames):
        return ""
    total = intervals.total(waits)
    parts = []
    for name, pattern in _PARTS:
        chosen = review.capture.matching(pattern.search)[frames.name]
        inside = intervals.intersect(waits, intervals.union(frames.start_ns[chosen], frames.end_ns[chosen]))
        share = intervals.total(inside) / total
        if share >= 0.01:
            parts.append(f"{name} {format_share(share)}")
    return f": {', '.join(parts)}" if parts else ""


def _advice(review: Review) -> Advice:
    """Workers where the CPUs of the recorded process leave room for more, a cheaper sample where they do not."""
    workers, cpus = review.capture.environment.num_workers, review.capture.environment.num_cpus
    cheaper = "make a sample cheaper (decode once, smaller images, fewer copies)"
    if workers is None or workers < 8:
        cheaper += "; one that waits for files or a network gains from more workers than CPUs, 4 to 8"
    if cpus is not None and workers_for(cpus) == 0:
        return Advice(text=f"{_may_use(cpus)}, where a worker would only take turns with the loop: {cheaper}")
    if cpus is not None and workers and workers >= workers_for(cpus, workers):
        return Advice(text=f"{format_plural(workers, 'worker')}, and {_may_use(cpus)}: {cheaper}")
    text = "give the loader more workers, or make a sample cheaper"
    if workers == 0:
        text = "the loader works in the training process: give it workers"
    fit = 0 if cpus is None else workers_for(cpus, workers or 0)
    room = "" if cpus is None else f" ({_may_use(cpus)}: {format_plural(fit, 'worker')} beside the loop)"
    lines = loader_lines(cpus, workers or 0)
    if any(note.code == WITHOUT_CUDA for note in review.capture.notes):  # the DataLoader would only warn
        lines = tuple(line.replace(", pin_memory=True", "") for line in lines)
    return Advice(text=f"{text}{room}", lines=lines)


def _respawn_advice(review: Review) -> Advice:
    if has(review.capture, "persistent_workers"):
        return Advice(text="the workers persist already: build the DataLoader once, before the loop, not in each epoch")
    return advice("keep the workers from epoch to epoch", "worker-respawn")


def _may_use(cpus: float) -> str:
    return f"the process may use {format_plural(cpus, 'CPU')}"


def _site(review: Review) -> Site | None:
    """The line that asks for batches, where stack samples saw it."""
    capture = review.lines.capture
    named = capture.matching(_LOADER.search)
    pauses = capture.pauses
    chosen = named[pauses.name] if len(pauses) else slice(0)
    return review.lines.within(intervals.union(pauses.start_ns[chosen], pauses.end_ns[chosen]))


def check_worker_respawn(review: Review) -> Iterator[Priced]:
    """Workers started again inside the window, and the first batch from each: without persistent_workers, in each epoch
    anew."""
    starts, firsts = _worker_starts(review), _first_waits(review)
    if not len(starts[0]):
        return
    spans = intervals.merge(starts, firsts)
    edits = Edits(host_saved_ns=review.saved_by(spans))
    headroom = review.headroom(edits)
    num, waited = len(starts[0]), intervals.total(firsts)
    batch = f", {format_ms(waited / num)} of it for the first batch" if waited else ""
    finding = Finding(
        code="worker-respawn",
        severity=review.severity(headroom) if headroom else Severity.COST,
        title=f"DataLoader workers are started again ({format_ms(intervals.total(spans) / num)} each time{batch})",
        kind="worker_respawn",
        count=review.per_step(num),
        host_blocked_ns=round(intervals.total(spans) / review.num_steps),
        gpu_idle_ns=review.claim("worker-respawn", spans) if review.has_device else None,
        headroom=headroom,
        basis=review.basis,
        advice=_respawn_advice(review),
        evidence=worst(*spans),
    )
    yield Priced(finding=finding, edits=edits)


def _worker_starts(review: Review) -> Intervals:
    pauses = review.capture.pauses
    if not len(pauses):
        return intervals.EMPTY
    starts = pauses.take(review.capture.matching(lambda name: name == "worker-start")[pauses.name])
    return review.inside_steps(intervals.union(starts.start_ns, starts.end_ns))


def _first_waits(review: Review) -> Intervals:
    """The wait for the first batch after each start of workers, less what a batch takes otherwise: that is a wait for
    data, whoever started."""
    starts, waits = _worker_starts(review), loader_waits(review)
    if not len(starts[0]) or not len(waits[0]):
        return intervals.EMPTY
    ended = np.append(starts[0][1:], np.iinfo(np.int64).max)  # by when the next ones are started
    at = np.searchsorted(waits[0], starts[1])
    first = np.unique(at[(at < len(waits[0])) & (waits[0][np.minimum(at, len(waits[0]) - 1)] < ended)])
    others = np.delete(waits[1] - waits[0], first)
    usual = int(np.median(others)) if len(others) else 0
    return intervals.union(waits[0][first], waits[1][first] - usual)
