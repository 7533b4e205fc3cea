"""Run a script on the emulated CUDA device (or a GPU) and count, for each line, how often a step makes the host wait.

    report = check_script("train.py", ["--epochs", "1"])
    report.per_step         # the lines of the step, most frequent first
    report.occasional       # reads on every tenth step, evaluation, set-up inside the loop

A step is one optimizer update. What happens up to the end of the first step is set-up or lazy initialisation and is not
counted; the steps after it are.
"""

from __future__ import annotations

import contextlib
import linecache
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from perfdoctor.diagnose.finding import Advice, Binding, Diagnosis, Finding, Severity
from perfdoctor.diagnose.hit_counts import REGULAR_SHARE
from perfdoctor.diagnose.line_advice import advice_at
from perfdoctor.doors.script import as_main, execute_program, load_program, output_aside
from perfdoctor.doors.script_stop import ScriptStop
from perfdoctor.emulate import emulate_cuda
from perfdoctor.errors import INTERRUPTED, UsageError
from perfdoctor.record import crossings
from perfdoctor.record.call_site import HitLog
from perfdoctor.record.capture import Note, Site
from perfdoctor.record.sync_kinds import GARBAGE_COLLECTION, KINDS, UNSYNCHRONISED_READ, SyncKind
from perfdoctor.units import format_plural
from perfdoctor.watch.batches import detected
from perfdoctor.watch.clocks import num_allocations
from perfdoctor.watch.steps import BACKWARDS, HOOKS, StepDetector, now


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSite:
    """One line and kind of sync: how many a step, and in what share of the steps it was seen at all."""

    site: Site
    kind: str
    count: float  # a step: on every tenth step is 0.1
    share: float  # of the steps in which it was seen, 0 to 1
    total: int  # in the whole run, set-up included

    @property
    def meaning(self) -> SyncKind:
        """The row of the table of kinds: code, phrase and advice."""
        return KINDS[self.kind]

    @property
    def advice(self) -> Advice:
        """What to do about it, at that line."""
        return advice_at(self.kind, self.site)

    @property
    def per_step(self) -> bool:
        """Whether it belongs to the step."""
        return self.share >= REGULAR_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What one run on the emulated device showed."""

    source: str
    device: str  # in words
    num_steps: int  # counted ones: the first is not
    sites: tuple[CheckedSite, ...]
    notes: tuple[Note, ...] = ()

    @property
    def per_step(self) -> tuple[CheckedSite, ...]:
        """Sites of the step, most frequent first."""
        return tuple(site for site in self.sites if site.per_step)

    @property
    def occasional(self) -> tuple[CheckedSite, ...]:
        """Sites seen inside the loop, in less than half of its steps."""
        return tuple(site for site in self.sites if not site.per_step and site.count > 0)

    @property
    def failing(self) -> tuple[CheckedSite, ...]:
        """What a pull request should not add: sites of the step, and reads that race however seldom they come."""
        return tuple(site for site in self.sites if site.per_step or site.meaning.code == UNSYNCHRONISED_READ)

    @property
    def syncs_per_step(self) -> float:
        """All sites together: what a budget is held against."""
        return sum(site.count for site in self.sites)


def check_script(
    target: str | Path,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    max_steps: int | None = None,
    on_gpu: bool = False,
) -> CheckReport:
    """Run `target` (a path, or with `module` a module's name) as `__main__` on the emulated device, or `on_gpu`.

    It is stopped at the end of step `max_steps` where that is given. Its standard output goes to standard error.

    Raises:
        UsageError: there is no such script, it failed, it made fewer than two optimizer updates, its steps leave the
            device alone, or there is no GPU.
    """
    linecache.checkcache()  # a file of the same name that was read before may have been another
    program = load_program(str(target), module=module)
    ends: list[int] = []
    stop = ScriptStop(throw_away=False)

    def ended(stamp: int) -> None:
        ends.append(stamp)
        device.step_ended()
        if max_steps is not None and len(ends) > max_steps:
            stop()

    name = "the GPU" if on_gpu else "the emulated CUDA device"
    detector = StepDetector(now, ended, ends.clear)
    with _hooked_gpu() if on_gpu else _emulated() as device, detected(detector):
        with output_aside(), as_main(program, arguments):
            exit_code, _ = stop.run(partial(execute_program, program))
        log, notes, unused = device.log, device.notes, device.unused
    if len(ends) < 2 and len(detector.passes) > 1:
        ends, detector.source = detector.passes, BACKWARDS
    if detector.source != HOOKS:
        notes.append(Note(code="step-source", text=f"steps were taken from {detector.source}"))
    if exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    if exit_code:
        raise UsageError(f"{target}: the script failed on {name} (exit code {exit_code}; see above)")
    if len(ends) < 2:
        raise UsageError(
            f"{target}: {format_plural(len(ends), 'optimizer update')} seen; at least 2, or 2 backward passes, are "
            "needed to tell a step from set-up. Let the script run more steps."
        )
    if unused:
        raise UsageError(
            f"{target}: its steps leave {name} alone: they run on the CPU, where nothing waits for a GPU, so there is "
            "nothing to check. Move the model to the device, or give the script its own option for that"
        )
    sites = count_sites(log, ends)
    return CheckReport(source=str(target), device=name, num_steps=len(ends) - 1, sites=sites, notes=tuple(notes))


@dataclass(slots=True, kw_only=True)
class _Checked:
    """The device that a script is checked on. `look()`: how often it was used so far, and what of it is held now."""

    log: HitLog
    notes: list[Note]
    heal: Callable[[], None]
    look: Callable[[], tuple[int, int]]
    looks: list[tuple[int, int]] = field(default_factory=list)
    begun: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.begun = self.look()

    def step_ended(self) -> None:
        self.heal()
        self.looks.append(self.look())

    @property
    def unused(self) -> bool:
        """Whether the steps left it alone; of fewer than three, the whole script: the end of one is known when the
        next one updates. (A replayed CUDA graph allocates nothing, but holds memory.)"""
        looks = self.looks if len(self.looks) > 2 else [self.begun, self.look()]
        return looks[0][0] == looks[-1][0] and not any(held for _, held in looks)


@contextlib.contextmanager
def _emulated() -> Iterator[_Checked]:
    with emulate_cuda() as device:
        yield _Checked(log=device.log, notes=device.notes, heal=lambda: None, look=lambda: (crossings.num_ops, 0))


@contextlib.contextmanager
def _hooked_gpu() -> Iterator[_Checked]:
    """The live hooks on a real device, in the same form."""
    import torch

    from perfdoctor.watch.call_sites import CallSiteHooks

    if not torch.cuda.is_available():
        raise UsageError("there is no GPU here: check on the emulated CUDA device instead")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    log = HitLog()
    hooks = CallSiteHooks(log)
    try:
        hooks.catch_warnings()
        hooks.patch_calls()
        yield _Checked(log=log, notes=[], heal=hooks.heal, look=lambda: (num_allocations(), num_allocations("current")))
    finally:
        hooks.remove()


def count_sites(log: HitLog, ends: Sequence[int]) -> tuple[CheckedSite, ...]:
    """Sites of `log` with their rate between the first and the last of the step `ends` (ns), most frequent first."""
    num_steps = len(ends) - 1
    windows: dict[tuple[int, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    totals: dict[tuple[int, str], int] = defaultdict(int)
    for hit in log.hits:
        if KINDS[hit.kind].code == GARBAGE_COLLECTION:
            continue
        key = (hit.site, hit.kind)
        totals[key] += 1
        window = bisect_left(ends, hit.start_ns)
        if 0 < window <= num_steps:
            windows[key][window] += 1
    sites = [
        CheckedSite(
            site=log.sites.sites[key[0]],
            kind=key[1],
            count=sum(windows[key].values()) / num_steps,
            share=len(windows[key]) / num_steps,
            total=total,
        )
        for key, total in totals.items()
    ]
    return tuple(sorted(sites, key=lambda site: (-site.count, site.site.frame.file, site.site.frame.line, site.kind)))


def diagnosis_of(report: CheckReport) -> Diagnosis:
    """The report in the form that every renderer takes: sites of the step as findings, occasional ones left alone."""
    return Diagnosis(
        source=f"{report.source} on {report.device}, {format_plural(report.num_steps, 'step')}",
        step=None,
        accounting=None,
        binding=Binding.UNKNOWN,
        findings=tuple(_finding(site, report) for site in report.failing),
        leave_alone=tuple(_finding(site, report) for site in report.occasional if site not in report.failing),
        notes=report.notes,
    )


def _finding(site: CheckedSite, report: CheckReport) -> Finding:
    if site.meaning.code == UNSYNCHRONISED_READ:
        severity = Severity.ERROR
    else:
        severity = Severity.COST if site.per_step else Severity.INFO
    return Finding(
        code=site.meaning.code,
        severity=severity,
        title=site.meaning.phrase,
        kind=site.kind,
        site=site.site,
        count=site.count,
        withheld="a check counts; perfdoctor run on a GPU gives milliseconds",
        basis=f"counted on {report.device}, {format_plural(report.num_steps, 'step')}",
        advice=site.advice,
    )


__all__ = ["CheckReport", "CheckedSite", "check_script", "count_sites", "diagnosis_of"]
