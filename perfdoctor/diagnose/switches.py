"""Checks `anomaly-mode` and `debug-switches`: settings left on that slow every step."""

from __future__ import annotations

from collections.abc import Iterator

from perfdoctor.diagnose.advice import advice
from perfdoctor.diagnose.finding import Finding, Severity
from perfdoctor.diagnose.hit_counts import hit_counts
from perfdoctor.diagnose.replay import Edits
from perfdoctor.diagnose.review import Priced, Review
from perfdoctor.units import format_plural


def check_anomaly_mode(review: Review) -> Iterator[Priced]:
    """Anomaly detection: the many reads inside backward are this one cause."""
    groups = [group for group in review.sync_groups if group.kind == "anomaly_check"]
    counts = [count for count in hit_counts(review.capture) if count.kind == "anomaly_check"]
    if not review.capture.environment.anomaly_mode and not groups and not counts:
        return
    calls = frozenset(call for group in groups for call in group.calls)
    edits = Edits(unblocked=calls)
    headroom = review.headroom(edits) if calls else None
    site = next((group.place for group in groups if group.place), counts[0].place if counts else None)
    finding = Finding(
        code="anomaly-mode",
        severity=Severity.COST,
        title="autograd's anomaly detection is on: a stack for each op, a read for each gradient",
        kind="anomaly_mode",
        site=site,
        count=sum(count.per_step for count in counts) or review.per_step(len(calls)),
        headroom=headroom,
        withheld="" if headroom else "its cost is spread over every op; switch it off and compare",
        basis=review.basis,
        advice=advice("switch it off outside debugging", "anomaly-mode"),
    )
    yield Priced(finding=finding, edits=edits if calls else None)


def check_debug_switches(review: Review) -> Iterator[Priced]:
    """CUDA_LAUNCH_BLOCKING, a sync debug mode, more loader workers than CPUs."""
    environment = review.capture.environment
    if environment.launch_blocking:
        yield _switch(
            "launch-blocking",
            "CUDA_LAUNCH_BLOCKING is on: the host waits for every kernel",
            "unset CUDA_LAUNCH_BLOCKING",
        )
    if environment.sync_debug_mode:
        yield _switch(
            "sync-debug-mode",
            "torch.cuda.set_sync_debug_mode is on: a warning is built at every sync",
            "torch.cuda.set_sync_debug_mode('default') outside debugging",
        )
    workers, cpus = environment.num_workers, environment.num_cpus
    if workers and cpus and workers > cpus:
        yield _switch(
            "too-many-workers",
            f"{format_plural(workers, 'DataLoader worker')} on {format_plural(cpus, 'CPU')}",
            f"at most {format_plural(max(int(cpus) - 1, 1), 'worker')} here; more only take turns, unless samples wait "
            "for files or a network",
            Severity.INFO,
        )


def _switch(kind: str, title: str, text: str, severity: Severity = Severity.COST) -> Priced:
    finding = Finding(
        code="debug-switches",
        severity=severity,
        title=title,
        kind=kind.replace("-", "_"),
        withheld="its cost is spread over the whole step; change it and compare",
        basis="environment of the recording",
        advice=advice(text, ""),
    )
    return Priced(finding=finding)
