"""Checks on how the device spends its busy time: `no-tensor-cores`, `fusion`, `exposed-communication`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from perfdoctor.diagnose.accounting import windows
from perfdoctor.diagnose.advice import advice
from perfdoctor.diagnose.finding import Advice, Finding
from perfdoctor.diagnose.replay import Edits
from perfdoctor.diagnose.review import Priced, Review
from perfdoctor.diagnose.ruled_out import has, is_compiled, is_double, products, ruled_out
from perfdoctor.diagnose.runs import runs_of
from perfdoctor.record import intervals
from perfdoctor.record.capture import Ints, WorkKind
from perfdoctor.record.kernel_names import KernelClass, kernel_class, without_tensor_cores
from perfdoctor.units import format_ms, format_plural

MIN_SHARE = 0.01
# Products on tensor cores over the plain fp32 units: 2x to 16x by shape and type; tf32 on an A100 is 8x at best.
_TENSOR_CORE_GAIN = (2.0, 4.0, 8.0)
_FUSED_CLASSES = (KernelClass.POINTWISE, KernelClass.NORMALISATION)
_MIN_CHAIN = 3


def check_tensor_cores(review: Review) -> Iterator[Priced]:
    """Matrix kernels that run on the plain arithmetic units."""
    timeline = review.timeline
    if not review.has_device:
        return
    plain = timeline.capture.matching(
        lambda name: kernel_class(name) == KernelClass.MATRIX and without_tensor_cores(name)
    )
    rows = np.flatnonzero(plain[timeline.work.name] & (timeline.work.kind == WorkKind.KERNEL))
    rows = _in_steps(review, rows)
    spent = int((timeline.work.end_ns - timeline.work.start_ns)[rows].sum()) / review.num_steps
    if spent < MIN_SHARE * max(review.pricing.reference_ns, 1):
        return
    calls = np.unique(timeline.call_of_work[rows]).tolist()
    least, likely, most = (Edits(work_scale=dict.fromkeys(calls, 1 / gain)) for gain in _TENSOR_CORE_GAIN)
    headroom = review.headroom(likely, least, most)
    finding = Finding(
        code="no-tensor-cores",
        severity=review.severity(headroom),
        title=f"matrix products without tensor cores ({_name(review, rows)})",
        kind="no_tensor_cores",
        count=review.per_step(len(rows)),
        headroom=headroom,
        basis=review.basis + "; products 2 to 8 times as fast",
        advice=_tensor_core_advice(review, rows),
    )
    yield Priced(finding=finding, edits=likely)


def _tensor_core_advice(review: Review, rows: Ints) -> Advice:
    names = {review.capture.text(int(name)) for name in review.timeline.work.name[rows]}
    if all(map(is_double, names)):
        return Advice(text="they are in float64: make them float32, then allow TF32")
    if has(review.capture, "tf32"):
        return Advice(text="TF32 is allowed already: make the dimensions multiples of 8, or use bf16 autocast")
    if products(review.capture)[1]:
        text = "others run in half precision: take these into the autocast too, or allow TF32 (relative error 1e-3)"
        return advice(text, "no-tensor-cores")
    text = "allow TF32 (relative error about 1e-3), or bf16 autocast; keep dimensions multiples of 8"
    return advice(text, "no-tensor-cores")


def check_fusion(review: Review) -> Iterator[Priced]:
    """Chains of pointwise and normalisation kernels that one kernel could do: the most torch.compile could give."""
    if not review.has_device:
        return
    timeline = review.timeline
    chains = _chains(review)
    if not chains:
        return
    lengths = timeline.work.end_ns - timeline.work.start_ns
    # One pass over the memory of the longest of each chain; the others' reads and writes stay in registers.
    kept = {int(timeline.call_of_work[chain[np.argmax(lengths[chain])]]) for chain in chains}
    merged = {int(call) for chain in chains for call in timeline.call_of_work[chain]} - kept
    edits = review.pricing.replay.merged(merged)
    only_device = Edits(work_scale=dict.fromkeys(merged, 0.0))
    headroom = review.headroom(edits, low=only_device)
    spent = sum(int(lengths[chain].sum()) for chain in chains) / review.num_steps
    if headroom is None or headroom.mid_ns < MIN_SHARE * review.pricing.reference_ns:
        return
    number = sum(len(chain) for chain in chains)
    finding = Finding(
        code="fusion",
        severity=review.severity(headroom),
        title=(
            f"{format_plural(round(review.per_step(number)), 'pointwise kernel')}{review.a_step} in "
            f"{format_plural(round(review.per_step(len(chains))), 'chain')} that fusion would merge"
        ),
        kind="fusion",
        count=review.per_step(len(chains)),
        headroom=headroom,
        afterwards=f"they take {format_ms(spent)} of the device{review.a_step}",
        basis=review.basis + "; at most: each chain as its longest kernel",
        advice=_fusion_advice(review),
    )
    yield Priced(finding=finding, edits=edits)


def _fusion_advice(review: Review) -> Advice:
    if "compile" in ruled_out(review.capture):
        return Advice(
            text="these lie outside of what is compiled already: have torch.compile take the loss and the rest too"
        )
    return advice("torch.compile merges such chains", "fusion")


def _chains(review: Review) -> list[Ints]:
    """Work rows of kernels launched one after another that fusion could merge, at least three together."""
    timeline = review.timeline
    names = timeline.capture.strings
    classes = [kernel_class(name) in _FUSED_CLASSES and not is_compiled(name) for name in names]
    order = timeline.launch_order
    order = order[np.isin(order, _in_steps(review, order))]
    fusible = np.array(classes, bool)[timeline.work.name[order]] & (timeline.work.kind[order] == WorkKind.KERNEL)
    # Beyond some length it is a loop over tensors, which has its own check.
    return [order[a:b] for a, b in runs_of(fusible, shortest=_MIN_CHAIN) if b - a <= 4 * _MIN_CHAIN]


def check_communication(review: Review) -> Iterator[Priced]:
    """Collectives that no compute hides."""
    timeline = review.timeline
    if not len(timeline.work):
        return
    collective = timeline.capture.matching(lambda name: kernel_class(name) == KernelClass.COMMUNICATION)
    rows = np.flatnonzero(collective[timeline.work.name] & (timeline.work.kind == WorkKind.KERNEL))
    if not len(rows):
        return
    work = timeline.work
    spans = intervals.intersect(intervals.union(work.start_ns[rows], work.end_ns[rows]), windows(timeline))
    others = np.setdiff1d(np.arange(len(work)), rows)
    exposed = intervals.subtract(spans, intervals.union(work.start_ns[others], work.end_ns[others]))
    per_step = round(intervals.total(exposed) / review.num_windows)
    if per_step < MIN_SHARE * max(review.pricing.reference_ns, 1):
        return
    all_of_it = intervals.total(spans) / review.num_windows
    calls = np.unique(timeline.call_of_work[rows])
    edits = Edits(work_scale=dict.fromkeys(calls[calls >= 0].tolist(), 0.0))
    headroom = review.headroom(edits)
    finding = Finding(
        code="exposed-communication",
        severity=review.severity(headroom),
        title=f"collectives that no compute hides ({_name(review, rows)})",
        kind="exposed_communication",
        count=review.per_step(len(rows)),
        headroom=headroom,
        afterwards=f"{format_ms(per_step)} of {format_ms(all_of_it)}{review.a_step} are exposed",
        basis=review.basis + "; at most: collectives free of charge",
        advice=advice("overlap them (DDP buckets, gradient accumulation with no_sync), or look for the late rank", ""),
        evidence=tuple((int(a), int(b)) for a, b in zip(exposed[0][:3], exposed[1][:3], strict=True)),
    )
    yield Priced(finding=finding, edits=edits)


def _in_steps(review: Review, rows: Ints) -> Ints:
    first, last = review.call_range
    calls = review.timeline.call_of_work[rows]
    return rows[(calls >= first) & (calls < last)]


def _name(review: Review, rows: Ints) -> str:
    """The commonest kernel among the rows, short."""
    names = Counter(review.capture.text(int(name)) for name in review.timeline.work.name[rows])
    text = names.most_common(1)[0][0]
    return text if len(text) <= 48 else text[:45] + "..."
