"""diagnose(): one recording, or one for each rank, to a Diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from perfdoctor.diagnose.accounting import account
from perfdoctor.diagnose.copies import check_copies
from perfdoctor.diagnose.data_wait import check_data_wait, check_worker_respawn
from perfdoctor.diagnose.finding import (
    Accounting,
    Binding,
    Diagnosis,
    Finding,
    Severity,
    Skipped,
    StepTime,
)
from perfdoctor.diagnose.gradient_loop import check_gradient_loop
from perfdoctor.diagnose.host_pauses import check_allocator, check_garbage_collection
from perfdoctor.diagnose.host_sync import check_host_sync, check_unsynchronised_read
from perfdoctor.diagnose.joint import with_joint_headroom
from perfdoctor.diagnose.kernel_time import check_communication, check_fusion, check_tensor_cores
from perfdoctor.diagnose.launch_bound import check_launch_bound, check_small_kernels, kernel_gaps, late_launches
from perfdoctor.diagnose.ranks import combine_ranks
from perfdoctor.diagnose.review import Priced, Review, num_missing_kernels
from perfdoctor.diagnose.ruled_out import ruled_out
from perfdoctor.diagnose.switches import check_anomaly_mode, check_debug_switches
from perfdoctor.diagnose.tensor_loop import MIN_REPEATS
from perfdoctor.record.capture import Capture, Ints, Site
from perfdoctor.record.sync_kinds import HOST_SYNC
from perfdoctor.record.timeline import StepSpans, Timeline
from perfdoctor.units import format_ms, format_plural

Check = Callable[[Review], Iterator[Priced]]

# In the order in which they may claim idle time: what is surest first, the general explanation last.
CHECKS: tuple[Check, ...] = (
    check_unsynchronised_read,
    check_anomaly_mode,
    check_debug_switches,
    check_allocator,
    check_garbage_collection,
    check_worker_respawn,
    check_data_wait,
    check_gradient_loop,
    check_copies,
    check_host_sync,
    check_communication,
    check_launch_bound,
    check_small_kernels,
    check_tensor_cores,
    check_fusion,
)


def diagnose(capture: Capture) -> Diagnosis:
    """Judge one recording."""
    review, priced = review_of(capture)
    blind = review.missing is not None or _cut_beyond_replay(review)
    accounting = None if blind else account(review.timeline, review.claims)
    findings, remarks = with_joint_headroom(review, _without_shadowed(priced))
    if blind:
        findings = [replace(finding, gpu_idle_ns=None) for finding in findings]
    step, mean_ns = _step_time(review), _mean_step_ns(review)
    samples = _samples_per_step(review)
    return Diagnosis(
        source=capture.path or capture.source,
        step=step,
        accounting=accounting,
        binding=_binding(review, accounting, findings),
        findings=tuple(f for f in findings if f.severity != Severity.MINOR),
        leave_alone=tuple(f for f in findings if f.severity == Severity.MINOR),
        skipped=tuple(Skipped(check=check, why=why) for check, why in review.skipped),
        steps_per_s=1e9 / mean_ns if mean_ns else None,
        samples_per_s=samples / mean_ns * 1e9 if mean_ns and samples is not None else None,
        samples_per_step=samples,
        micro_batches=review.steps.micro_batches or None if review.steps else None,
        environment=capture.environment,
        notes=capture.notes,
        overheads=capture.overheads,
        advice=(*_of_one_device(capture, review), *_remarks(review, accounting), *remarks),
        ruled_out=ruled_out(capture),
    )


def review_of(capture: Capture) -> tuple[Review, list[Priced]]:
    """One recording after every check: what they found, and in the review who claimed which idle time."""
    review = Review(Timeline(capture), missing=num_missing_kernels(capture))
    priced = [each for check in CHECKS for each in check(review)]
    if not review.has_device:
        missing = "none of the host's CUDA calls" if len(review.timeline.work) else "no device work"
        review.skip("milliseconds on the device", f"{missing} was recorded; findings tell where, not how much")
    if review.has_device:
        # No findings of their own: idle time whose cause is known, so that little is left unexplained.
        review.claim("launch-gaps", late_launches(review))
        review.claim("kernel-gaps", kernel_gaps(review))
    return review, priced


def _cut_beyond_replay(review: Review) -> bool:
    """Whether a cut file lacks so many rows that the rest does not fit together: then idle time is not known."""
    cut = any(note.code == "truncated" for note in review.capture.notes)
    if not cut or not review.has_device or review.replayable:
        return False
    review.skip("how busy the GPU was", "the file is cut, and what is left of it does not fit together")
    return True


def _of_one_device(capture: Capture, review: Review) -> list[str]:
    devices = np.unique(capture.work.device)
    if len(devices) < 2:
        return []
    return [f"Work of {len(devices)} devices was recorded: this page is of device {review.timeline.work.device[0]}."]


def diagnose_ranks(captures: Sequence[Capture], missing: Mapping[int, str] | None = None) -> Diagnosis:
    """Judge the ranks of one run together: one page, a table of all, the late rank and why, shared findings said once.

    Args:
        captures: one for each rank that recorded; at least one.
        missing: ranks that have no recording, and why each has none.
    """
    if len(captures) == 1 and not missing:
        return diagnose(captures[0])
    return combine_ranks(captures, [diagnose(capture) for capture in captures], missing)


def _step_time(review: Review) -> StepTime | None:
    bare, steps = review.capture.bare, review.steps
    if bare is not None and len(bare.step_ns):
        clock = "CUDA events" if bare.clock == "cuda-event" else "the host's clock"
        return _quartiles(bare.step_ns, f"bare steps by {clock}")
    if steps is None:
        return None
    if not steps.known:
        length = int(steps.window_end_ns[0] - steps.window_start_ns[0])
        basis = "the whole of it: it marks no steps"
        return StepTime(median_ns=length, low_ns=length, high_ns=length, num_steps=0, basis=basis)
    if steps.origin == "repetition":
        basis = "turns of the launch sequence, slowed by the recorder: the recording marks no steps"
        return _quartiles(_recorded_steps(review, steps), basis)
    return _quartiles(_recorded_steps(review, steps), "recorded steps, slowed by the recorder")


def _recorded_steps(review: Review, steps: StepSpans) -> Ints:
    """How long each recorded step took, without partial ones where there are others. Shape (n,), ns."""
    # Of one or two steps the first device window is cut short: it begins with the first work that was recorded.
    lengths = np.diff(steps.window_end_ns) if len(steps) > 2 else steps.host_end_ns - steps.host_start_ns
    if steps.origin == "repetition":
        return lengths
    partial = review.capture.steps.partial[steps.index]
    whole = lengths[partial[-len(lengths) :] == 0]
    return whole if len(whole) else lengths


def _mean_step_ns(review: Review) -> float | None:
    """What both rates rest on: the mean of the steps whose median `_step_time` gives; None where none is known."""
    bare, steps = review.capture.bare, review.steps
    if bare is not None and len(bare.step_ns):
        return float(bare.step_ns.mean()) or None
    if steps is None or not steps.known:
        return None
    return float(_recorded_steps(review, steps).mean()) or None


def _quartiles(lengths: np.ndarray, basis: str) -> StepTime:  # type: ignore[type-arg]
    low, median, high = (int(v) for v in np.percentile(lengths, (25, 50, 75)))
    return StepTime(median_ns=median, low_ns=low, high_ns=high, num_steps=len(lengths), basis=basis)


def _samples_per_step(review: Review) -> float | None:
    bare = review.capture.bare
    if bare is not None and len(bare.samples):
        # A step between two updates on one batch takes none of its own.
        samples = np.where(bare.micro_batches == 0, 0, bare.samples) if bare.micro_batches.any() else bare.samples
        if (samples >= 0).all():
            return float(samples.mean())
    steps = review.steps
    return steps.samples if steps is not None and steps.known and steps.samples >= 0 else None


def _binding(review: Review, accounting: Accounting | None, findings: Sequence[Finding]) -> Binding:
    """What the loop waits for: idle time by its largest cause, busy time by its largest class."""
    if accounting is None or not accounting.window_ns:
        return Binding.UNKNOWN if review.has_device else _binding_without_device(findings)
    idle = accounting.window_ns - accounting.busy_ns
    if idle <= 0.25 * accounting.window_ns:
        classes = {
            Binding.MATRIX: accounting.matrix_ns,
            Binding.BANDWIDTH: accounting.bandwidth_ns,
            Binding.COPIES: accounting.copy_ns,
            Binding.COMMUNICATION: accounting.communication_ns,
        }
        return max(classes, key=lambda binding: classes[binding])
    causes = {
        "data-wait": Binding.HOST_DATA,
        "worker-respawn": Binding.HOST_DATA,
        "host-sync": Binding.HOST_SYNC,
        "pageable-copy": Binding.COPIES,
        "blocking-copy": Binding.COPIES,
        "launch-bound": Binding.HOST_LAUNCHING,
        "gradient-loop": Binding.HOST_LAUNCHING,
        "launch-gaps": Binding.HOST_LAUNCHING,
    }
    shares: dict[Binding, int] = {}
    for code, taken in accounting.idle_by_code.items():
        shares[causes.get(code, Binding.UNKNOWN)] = shares.get(causes.get(code, Binding.UNKNOWN), 0) + taken
    shares[Binding.UNKNOWN] = shares.get(Binding.UNKNOWN, 0) + accounting.unexplained_ns
    binding = max(shares, key=lambda each: shares[each])
    # A sync in a loop that the host cannot outrun claims idle time and gives nothing back: the host binds that loop.
    if binding == Binding.HOST_SYNC and not _gives_back(review, findings, "host-sync"):
        return Binding.HOST_LAUNCHING
    return binding


def _gives_back(review: Review, findings: Sequence[Finding], code: str) -> bool:
    return any(
        f.code == code and f.headroom is not None and f.headroom.mid_ns > 0.05 * review.pricing.reference_ns
        for f in findings
    )


def _binding_without_device(findings: Sequence[Finding]) -> Binding:
    return Binding.HOST_DATA if findings and findings[0].code == "data-wait" else Binding.UNKNOWN


def _without_shadowed(priced: Sequence[Priced]) -> list[Priced]:
    """One cause said once: small kernels in a loop bound by launches, the reads that a loop over tensors makes."""
    codes = {each.finding.code for each in priced}
    loops = {f.site for f in (each.finding for each in priced) if f.code == "gradient-loop" and f.site is not None}
    kept = (each for each in priced if each.finding.code != "small-kernels" or "launch-bound" not in codes)
    return [_part_of_loop(each) if _reads_in(each.finding, loops) else each for each in kept]


def _reads_in(finding: Finding, loops: set[Site]) -> bool:
    return finding.code == HOST_SYNC and finding.site in loops and finding.count >= MIN_REPEATS


def _part_of_loop(priced: Priced) -> Priced:
    """The reads of a loop stay a finding of their own, behind those whose cure they are not part of."""
    finding = replace(
        priced.finding,
        severity=Severity.INFO,
        afterwards="part of the loop over tensors at this line: its cure takes them",
        part_of="gradient-loop",
    )
    return replace(priced, finding=finding)


def _remarks(review: Review, accounting: Accounting | None) -> list[str]:
    remarks = []
    if accounting is not None and accounting.window_ns:
        share = accounting.busy_ns / accounting.window_ns
        if share > 0.75:
            remarks.append("GPU busy is not GPU efficient: it says that a kernel ran, not that it ran well.")
    steps = review.steps
    if steps is not None and steps.origin == "repetition":
        remarks.append(
            "The recording marks no steps. Its launches repeat "
            f"{format_plural(len(steps), 'time')}; such a turn is taken for a step."
        )
    if steps is not None and not steps.known:
        remarks.append("The recording marks no steps: all figures are for the whole window.")
    if any(note.code == "truncated" for note in review.capture.notes):
        remarks.append(
            "The file is cut, and its rows are not in order of time: what looks idle may be work whose rows are gone."
        )
    if steps is not None and steps.num_runs > 1:
        remarks.append(
            f"The recording holds {steps.num_runs} runs of steps with pauses between them: the longest is judged, "
            f"{format_plural(len(steps), 'step')}."
        )
    bare = review.pricing.bare_step_ns
    if bare and review.replayable and abs(review.pricing.step_ns / bare - 1) > 0.1:
        remarks.append(
            f"The replay, corrected for tracing, gives {format_ms(review.pricing.step_ns)} where the bare step took "
            f"{format_ms(bare)}: headroom is scaled to the bare step, and less sure."
        )
    return remarks
