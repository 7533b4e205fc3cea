"""Check `gradient-loop`: a Python loop over many tensors that one multi-tensor call replaces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from perfdoctor.diagnose.advice import advice
from perfdoctor.diagnose.finding import Advice, Finding
from perfdoctor.diagnose.host_sync import worst
from perfdoctor.diagnose.replay import Edits
from perfdoctor.diagnose.review import Priced, Review
from perfdoctor.diagnose.tensor_loop import TensorLoop, find_tensor_loops
from perfdoctor.record import intervals
from perfdoctor.record.capture import Site
from perfdoctor.record.timeline import SYNCS
from perfdoctor.units import format_plural

CODE = "gradient-loop"
# Host time of the multi-tensor form: torch's foreach norm of 1000 tensors took 2.62 ms on an H200's host.
_MULTI_TENSOR_NS = 2_600


def check_gradient_loop(review: Review) -> Iterator[Priced]:
    """Loops over tensors, the same loop of different steps as one finding."""
    first, last = review.call_range
    groups: dict[tuple[tuple[str, ...], Site | None], list[TensorLoop]] = {}
    for loop in find_tensor_loops(review.timeline):
        if first <= loop.first_call < last:
            groups.setdefault((loop.motif, _site(review, loop)), []).append(loop)
    for (motif, known), loops in groups.items():
        site = known or review.lines.of_loop(motif)
        # Once in a while (an evaluation, a log line) is no loop of the step.
        if 2 * len(loops) >= review.num_steps:
            yield _finding(review, motif, site, loops)


def _finding(review: Review, motif: tuple[str, ...], site: Site | None, loops: list[TensorLoop]) -> Priced:
    calls = review.timeline.calls
    starts = np.array([calls.start_ns[loop.first_call] for loop in loops], np.int64)
    ends = np.array([calls.end_ns[loop.last_call] for loop in loops], np.int64)
    edits = _multi_tensor(review, loops)
    headroom = review.headroom(edits)
    tensors = int(np.median([loop.repeats for loop in loops]))
    launches = tensors * sum(name != "read" for name in motif)
    title, tip, key = describe(motif, site.text if site is not None else "")
    if key == "optimizer-loop" and not review.capture.environment.fused_optimizer:
        site = _built_at(review, site)
    reads = f" and {format_plural(tensors * motif.count('read'), 'read')}" if "read" in motif else ""
    finding = Finding(
        code=CODE,
        severity=review.severity(headroom),
        title=f"{title}: {format_plural(launches, 'launch')}{reads} for {format_plural(tensors, 'tensor')}",
        kind="slow_grad_norm_loop" if key == "norm-loop" else "launch_bound",
        site=site,
        count=review.per_step(len(loops)),
        host_blocked_ns=round(int((ends - starts).sum()) / review.num_steps),
        gpu_idle_ns=review.claim(CODE, intervals.union(starts, ends)),
        headroom=headroom,
        afterwards=f"{format_plural(len(motif), 'call')} a tensor: {', '.join(dict.fromkeys(motif))}",
        basis=review.basis,
        advice=_advice(review, tip, key),
        evidence=worst(starts, ends),
    )
    return Priced(finding=finding, edits=edits)


def _advice(review: Review, tip: str, key: str) -> Advice:
    """An optimizer that is fused already is not to blame: then it is an update by hand."""
    if key == "optimizer-loop" and review.capture.environment.fused_optimizer:
        tip, key = "the optimizer is fused already: torch._foreach_* for what is updated by hand", "hand-loop"
    return Advice(text=tip, lines=advice("", key).lines)


def _built_at(review: Review, step: Site | None) -> Site | None:
    """The line that built the optimizer, which is the one to change; its step is where that is called from."""
    built = set(review.capture.optimizers)
    if len(built) != 1:
        return step
    line = built.pop()
    return replace(line, caller=step.frame if step is not None else None)


def _multi_tensor(review: Review, loops: list[TensorLoop]) -> Edits:
    """One turn of each loop stays and stands for the multi-tensor call: its launches carry the whole device work."""
    timeline = review.timeline
    work = timeline.work
    dropped: set[int] = set()
    added: dict[int, int] = {}
    scale: dict[int, float] = {}
    for loop in loops:
        calls = timeline.call_of_work[loop.works]
        kept = [int(c) for c, name in zip(calls, loop.motif, strict=False) if name != "read"]
        lane = timeline.calls.thread[loop.first_call]
        inside = np.arange(loop.first_call, loop.last_call + 1)
        inside = inside[timeline.calls.thread[inside] == lane]
        dropped.update(set(inside.tolist()) - set(kept))
        dropped.update(_waits_after(review, loop))
        if kept:
            added[kept[0]] = -_MULTI_TENSOR_NS * loop.repeats
        length = (work.end_ns - work.start_ns)[loop.works]
        # A small kernel's own time is mostly its start and end: what lies above the shortest is moving memory.
        moving = int((length - length.min()).sum())
        own = sum(int(length[i]) for i in range(len(kept)))
        for call in kept:
            scale[call] = max((moving + own) / max(own, 1), 1.0)
    return Edits(dropped=frozenset(dropped), host_saved_ns=added, work_scale=scale)


def _waits_after(review: Review, loop: TensorLoop) -> list[int]:
    """The sync that follows the loop's last read is the loop's too."""
    calls = review.timeline.calls
    after = loop.last_call + 1
    if loop.reads and after < len(calls) and calls.thread[after] == calls.thread[loop.last_call]:
        return [after] if calls.kind[after] in SYNCS else []
    return []


def describe(motif: tuple[str, ...], line: str = "") -> tuple[str, str, str]:
    """What the loop computes, what replaces it, and the key of the lines to paste. `line`: where it is, if known."""
    text = " ".join(motif).lower()
    if "norm" in text:
        return (
            "a norm for each tensor, one by one",
            "one multi-tensor norm: torch.nn.utils.get_total_norm, read it every N steps",
            "norm-loop",
        )
    if "addcdiv" in text or ("sqrt" in text and "addcmul" in text):
        return "a single-tensor optimizer step", "let the optimizer work on all tensors at once", "optimizer-loop"
    if ("lerp" in text and len(motif) <= 2) or _averages(motif, line):
        return "an average of each tensor by hand", "one multi-tensor lerp", "ema-loop"
    if len(motif) == 1 and ("mul" in text or "div" in text):
        return "each tensor scaled by hand", "one multi-tensor multiplication", "scale-loop"
    if len(motif) <= 3 and "add" in text:
        return (
            "small updates, tensor by tensor",
            "let the optimizer (fused=True or foreach=True) or torch._foreach_* work on all tensors at once",
            "optimizer-loop",
        )
    return (
        "the same few small kernels for each tensor",
        "use torch._foreach_* on the whole list, or stack the tensors",
        "",
    )


_AVERAGE = re.compile(r"ema\b|\bema|shadow|averag|\bavg|teacher|polyak|\btau\b", re.IGNORECASE)


def _averages(motif: tuple[str, ...], line: str) -> bool:
    """`e.mul_(d).add_(p, alpha=1 - d)`, or `d * e + (1 - d) * p`. An optimizer with momentum adds more often than it
    multiplies."""
    names = [name.lower() for name in motif if name != "read"]
    added, scaled = (sum(word in name for name in names) for word in ("add", "mul"))
    if ".step(" in line or added < 1 or len(names) > 4 or any("addc" in name for name in names):
        return False
    return scaled >= added or bool(_AVERAGE.search(line))


def _site(review: Review, loop: TensorLoop) -> Site | None:
    """The line of the loop: that of the hit inside it, or of the optimizer step around it, where hooks saw one."""
    capture, calls = review.capture, review.timeline.calls
    start, end = int(calls.start_ns[loop.first_call]), int(calls.end_ns[loop.last_call])
    for group in review.sync_groups:
        if loop.reads and group.place is not None:
            inside = [loop.first_call <= call <= loop.last_call + 1 for call in group.calls]
            if sum(inside) >= 0.5 * loop.repeats:
                return group.place
    hits = capture.hits
    around = np.flatnonzero((hits.start_ns <= start) & (hits.end_ns >= end) & (hits.site >= 0))
    if len(around):
        innermost = around[np.argmax(hits.start_ns[around])]
        return capture.sites[int(hits.site[innermost])]
    return None
