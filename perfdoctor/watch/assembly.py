"""From what a recorder kept to a Capture.

`Capture.steps` holds the steps of the sites and light phases, in order, `index` being the loop's own count; `hits.step`
and `pauses.step` are rows of it. Device work lies in the light phase only. The full recording is a capture of its own
with its own steps. A loop that ended before the sites phase had three steps gets the hits of its warm-up instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import mode
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.call_site import Hit
from perfdoctor.record.capture import (
    Bare,
    Capture,
    Hits,
    Note,
    Overhead,
    Pauses,
    Phase,
    RangeKind,
    Ranges,
    Samples,
    Site,
    Steps,
)
from perfdoctor.record.note_codes import WITHOUT_CUDA
from perfdoctor.watch.clocks import device_is_there, durations
from perfdoctor.watch.overhead import measure_overhead
from perfdoctor.watch.pauses import Pause
from perfdoctor.watch.plan import Row, Stage
from perfdoctor.watch.recorder import Recorder
from perfdoctor.watch.steps import HOOKS
from perfdoctor.watch.surroundings import describe_optimizers, describe_settings, read_environment

_FEWEST = 3
_PHASES = {Stage.WARMUP: Phase.SITES, Stage.SITES: Phase.SITES, Stage.LIGHT: Phase.LIGHT, Stage.FULL: Phase.FULL}


def assemble(recorder: Recorder) -> Capture:
    """The capture of a stopped recorder. Waits for the device: the loop is over."""
    optimizers = [optimizer for ref in recorder.steps.optimizers.values() if (optimizer := ref()) is not None]
    times = _Times(recorder.rows)
    light = _recording(recorder, Stage.LIGHT) or Capture(source="session")
    full = _recording(recorder, Stage.FULL)
    capture = _with_loop(
        replace(light, source="session"), recorder, _watched(recorder.rows, min(_FEWEST, recorder.plan.active))
    )
    if full is not None:
        full = _with_loop(full, recorder, [row for row in recorder.rows if row.stage == Stage.FULL and row.settled])
        full = replace(full, costs=recorder.costs)
    environment = read_environment(recorder.batches.loader, optimizers, recorder.hooks.user_mode)
    return replace(
        capture,
        optimizers=recorder.constructions.of(optimizers),
        environment=replace(environment, pinned_h2d_bytes_per_s=recorder.pinned_bytes_per_s),
        costs=recorder.costs,
        notes=(
            *_without_step_note(light),
            *recorder.notes,
            *_notes(recorder),
            *_without_cuda(recorder, light, optimizers),
            *describe_optimizers(optimizers),
            *describe_settings(recorder.batches.loader, recorder.batches.prefetched),
            *times.notes,
        ),
        overheads=times.overheads(),
        bare=times.bare(),
        full=full,
    )


def _without_step_note(light: Capture) -> list[Note]:
    # The reader misses step marks in the file; the session has its own.
    return [note for note in light.notes if note.code != "no-steps"]


class _Times:
    """Step durations by phase. If the device cannot be asked any more, host times stand in."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.notes: list[Note] = []
        self._rows = rows

    def bare(self) -> Bare | None:
        rows = self._measured(Stage.BARE)
        if not rows:
            return None
        return Bare(
            step_ns=self._durations(rows),
            data_ns=np.array([row.data_ns for row in rows], np.int64),
            samples=np.array([row.samples for row in rows], np.int64),
            micro_batches=np.array([row.micro_batches for row in rows], np.int64),
            clock="cuda-event" if rows[0].end.event is not None else "host",
        )

    def overheads(self) -> tuple[Overhead, ...]:
        bare = self._durations(self._measured(Stage.BARE))
        stages = (Stage.SITES, Stage.LIGHT, Stage.FULL)
        rows = ((stage, self._measured(stage)) for stage in stages)
        found = (measure_overhead(stage.name.lower(), bare, self._durations(kept)) for stage, kept in rows)
        return tuple(overhead for overhead in found if overhead is not None)

    def _measured(self, stage: Stage) -> list[Row]:
        return [row for row in self._rows if row.stage == stage and row.settled and row.complete]

    def _durations(self, rows: Iterable[Row]) -> NDArray[np.int64]:
        pairs = [(row.start, row.end) for row in rows]
        try:
            return durations(pairs)
        except RuntimeError as error:  # a CUDA error that ended the loop comes out here again
            self.notes.append(Note(code="host-clock", text=f"step times are host times: {error}"))
            return np.array([end.ns - start.ns for start, end in pairs], np.int64)


def _recording(recorder: Recorder, stage: Stage) -> Capture | None:
    from perfdoctor.record.load import load_capture

    window = recorder.windows.get(stage)
    if window is None:
        return None
    capture = window.capture(load_capture)
    if window.problem and not any(note.text == window.problem for note in recorder.notes):
        recorder.notes.append(Note(code="no-recording", text=f"{stage.name.lower()} recording: {window.problem}"))
    return capture


def _watched(rows: Sequence[Row], fewest: int) -> list[Row]:
    kept = [row for row in rows if row.stage in (Stage.SITES, Stage.LIGHT) and row.settled]
    if sum(row.stage == Stage.SITES and row.complete for row in kept) >= fewest:
        return kept
    # The very first step holds set-up and lazy initialisation.
    return [row for row in rows if row.stage in (Stage.WARMUP, Stage.SITES, Stage.LIGHT) and row.number > 0]


def _with_loop(capture: Capture, recorder: Recorder, rows: Sequence[Row]) -> Capture:
    strings = list(capture.strings)
    index = {text: i for i, text in enumerate(strings)}

    def intern(text: str) -> int:
        if text not in index:
            index[text] = len(strings)
            strings.append(text)
        return index[text]

    sites = recorder.log.sites.sites
    hits = _hits(recorder.log.hits, rows, intern, _merged(sites))
    pauses = _pauses(recorder.pauses, rows, intern)
    ranges = _ranges(capture.ranges, recorder.ranges.rows, rows, intern)
    return replace(
        capture, strings=tuple(strings), sites=tuple(sites), samples=_samples(recorder.sampler.rows, rows),
        steps=_steps(rows, _backwards(recorder, rows)), hits=hits, pauses=pauses, ranges=ranges,
    )  # fmt: skip


def _steps(rows: Sequence[Row], backwards: Sequence[int]) -> Steps:
    partial = _partial(rows)
    return Steps.from_rows(
        (row.start.ns, row.end.ns, row.number, row.micro_batches or passes, row.samples, row.complete, short)
        for row, passes, short in zip(rows, backwards, partial, strict=True)
    )


def _backwards(recorder: Recorder, rows: Sequence[Row]) -> list[int]:
    """Backward passes of each step: its micro-batches where no loader was seen. Those of one closure count once."""
    if len(recorder.steps.optimizers) > 1:  # several losses a batch: passes say nothing about batches
        return [0] * len(rows)
    closures = [row for row in recorder.ranges.rows if row.name == "closure"]
    passes = [row for row in recorder.ranges.rows if row.name == "backward"]
    outside = [p for p in passes if not any(c.start_ns <= p.start_ns < c.end_ns for c in closures)]
    at = _rows_of(np.array([row.start_ns for row in (*outside, *closures)], np.int64), rows)
    return [int(count) for count in np.bincount(at[at >= 0], minlength=len(rows))]


def _merged(sites: Sequence[Site]) -> list[int]:
    """For each site the first with the same lines of the user's: one print reads a tensor at many lines of torch."""
    first: dict[Any, int] = {}
    return [
        first.setdefault((site.frame, site.caller, site.owner) if site.owner == "torch" else site, index)
        for index, site in enumerate(sites)
    ]


def _samples(looks: Sequence[tuple[int, int, int]], rows: Sequence[Row]) -> Samples:
    at = _rows_of(np.array([look[0] for look in looks], np.int64), rows)
    return Samples.from_rows(look for look, row in zip(looks, at.tolist(), strict=True) if row >= 0)


def _partial(rows: Sequence[Row]) -> list[bool]:
    """Which steps ran on fewer samples than most: the last, short batch of an epoch."""
    known = [row.samples for row in rows if row.samples >= 0 and row.complete]
    if not known:
        return [False] * len(rows)
    usual = mode(known)
    if known.count(usual) * 2 <= len(known):  # batches of every size: none of them is the short one
        return [False] * len(rows)
    return [0 <= row.samples < usual for row in rows]


def _rows_of(times: NDArray[np.int64], rows: Sequence[Row]) -> NDArray[np.int64]:
    """The row that each moment lies in; -1 outside."""
    if not rows or not len(times):
        return np.full(len(times), -1, np.int64)
    starts = np.array([row.start.ns for row in rows], np.int64)
    ends = np.array([row.end.ns for row in rows], np.int64)
    at = np.searchsorted(starts, times, side="right") - 1
    inside = (at >= 0) & (times < ends[np.maximum(at, 0)])
    return np.where(inside, at, -1).astype(np.int64)


def _hits(hits: Sequence[Hit], rows: Sequence[Row], intern: Any, merged: Sequence[int]) -> Hits:
    hits = sorted(hits, key=lambda hit: hit.end_ns)
    at = _rows_of(np.array([hit.end_ns for hit in hits], np.int64), rows)
    return Hits.from_rows(
        (hit.start_ns, hit.end_ns, hit.thread, merged[hit.site], intern(hit.kind), row, _PHASES[rows[row].stage])
        for hit, row in zip(hits, at.tolist(), strict=True)
        if row >= 0
    )


def _pauses(pauses: Sequence[Pause], rows: Sequence[Row], intern: Any) -> Pauses:
    at = _rows_of(np.array([pause.end_ns for pause in pauses], np.int64), rows)
    return Pauses.from_rows(
        (pause.start_ns, pause.end_ns, pause.thread, intern(pause.name), row, pause.amount)
        for pause, row in zip(pauses, at.tolist(), strict=True)
        if row >= 0
    )


def _ranges(recorded: Ranges, phases: Sequence[Pause], rows: Sequence[Row], intern: Any) -> Ranges:
    at = _rows_of(np.array([phase.start_ns for phase in phases], np.int64), rows)
    added = Ranges.from_rows(
        (phase.start_ns, phase.end_ns, phase.thread, intern(phase.name), RangeKind.PHASE)
        for phase, row in zip(phases, at.tolist(), strict=True)
        if row >= 0
    )
    columns = {name: np.concatenate((values, added.columns()[name])) for name, values in recorded.columns().items()}
    return Ranges(**columns)


def _rounded(count: float) -> str:
    """The first and last cycle may be cut: 5.04 is 5."""
    whole = round(count)
    return str(whole) if whole and abs(count / whole - 1) < 0.1 else f"{count:.2g}"


def _without_cuda(recorder: Recorder, light: Capture, optimizers: Sequence[Any]) -> list[Note]:
    """A note where the steps left the CUDA device alone, though a probe of the script's may have woken it."""
    if not recorder.leaves_device_alone or len(light.work):
        return []
    text = "the loop does not use CUDA"
    if recorder.emulated or device_is_there():
        firsts = {
            type(each).__name__: next((p for g in each.param_groups for p in g["params"]), None) for each in optimizers
        }
        on_cpu = [name for name, first in firsts.items() if first is not None and first.device.type == "cpu"]
        seen = f"; the parameters of {' and '.join(on_cpu)} are on the CPU" if on_cpu else ""
        text += f", though a device is there{seen} (model.to('cuda'), or the script's own option)"
    return [Note(code=WITHOUT_CUDA, text=f"{text}: host-side findings only, no device times")]


def _notes(recorder: Recorder) -> list[Note]:
    notes = []
    done, planned = sum(row.complete for row in recorder.rows), recorder.plan.total(recorder.stages)
    if not done:
        text = "no step was seen: no optimizer stepped, no batch was handed out and session.step() was not called"
        notes.append(Note(code="no-steps", text=text))
    elif recorder.rows[-1].stage not in (Stage.DONE, recorder.stages[-1]) or not recorder.rows[-1].complete:
        notes.append(Note(code="stopped-early", text=f"only {done} of {planned} planned steps were seen", count=done))
    if recorder.steps.source != HOOKS:
        notes.append(Note(code="step-source", text=f"steps were taken from {recorder.steps.source}"))
    updates = recorder.steps.updates_per_step()
    if len(updates) > 1 and recorder.steps.source == HOOKS:
        parts = " and ".join(f"{_rounded(count)} of {type(each).__name__}" for each, count in updates)
        notes.append(Note(code="several-optimizers", text=f"{len(updates)} optimizers: updates a step are {parts}"))
    if recorder.steps.num_skipped:
        text = "updates left out by GradScaler; each counts as a step"
        notes.append(Note(code="skipped-updates", text=text, count=recorder.steps.num_skipped))
    return notes
