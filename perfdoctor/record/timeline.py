"""Timeline: a Capture with its links: which call launched which work, in which step, and when the device was busy.

All arrays are sorted by start. Times are integer ns on the recording's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record import intervals
from perfdoctor.record.capture import CallKind, Calls, Capture, Columns, Ints, Work
from perfdoctor.record.devices import busiest_device
from perfdoctor.record.intervals import Intervals
from perfdoctor.record.processes import of_one_process
from perfdoctor.record.repetition import find_repetition

LAUNCHING = (CallKind.LAUNCH, CallKind.GRAPH_LAUNCH, CallKind.MEMCPY, CallKind.MEMSET)
_UNSORTED = ("steps", "hits", "samples")
SYNCS = (CallKind.SYNC_DEVICE, CallKind.SYNC_STREAM, CallKind.SYNC_EVENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpans:
    """The steps that a diagnosis speaks of, and where they come from.

    `origin`: 'marks' (ProfilerStep, NVTX, a live session), 'repetition' (no marks, but the launch sequence repeats: its
    turns) or 'window' (neither: the whole window stands for one step).

    `host_start_ns`, `host_end_ns`, `window_start_ns`, `window_end_ns`: shape (num_steps,). A step's device window runs
    from the end of the previous step's device work to the end of its own.
    """

    host_start_ns: Ints
    host_end_ns: Ints
    window_start_ns: Ints
    window_end_ns: Ints
    index: Ints  # rows of Capture.steps; -1 where not marked
    origin: str
    micro_batches: float  # a step; 0 where unknown
    samples: float  # a step; -1 where unknown
    first_cut: bool = False  # no work before the first step was recorded: its window begins with its own first work
    num_runs: int = 1  # runs of steps in the recording (cycles of a profiler); these steps are the longest of them

    @property
    def known(self) -> bool:
        """Whether these are steps, not the whole window."""
        return self.origin != "window"

    @property
    def judged(self) -> slice:
        """The windows that are as long as a step: without the first where it is cut, unless there is no other."""
        return slice(1 if self.first_cut and len(self) > 1 else 0, len(self))

    @property
    def num_judged(self) -> int:
        """How many windows those are."""
        return len(self.host_start_ns[self.judged])

    def __len__(self) -> int:
        return len(self.host_start_ns)


def _sorted(table: Columns) -> Columns:
    starts: Ints = table.start_ns  # type: ignore[attr-defined]
    if len(starts) < 2 or bool((starts[1:] >= starts[:-1]).all()):
        return table
    return table.take(np.argsort(starts, kind="stable"))


class Timeline:
    """Links over one capture. Build it once, hand it to every check.

    Attributes:
        capture: the recording, its tables sorted by start.
        calls, work: short for the capture's tables. They are of one process, and `work` of one device, the busiest.
        call_of_work: (num_work,) index into `calls` of the launching call, -1 where it was not recorded.
        steps: the steps on the host and on the device; None where nothing was recorded.
    """

    def __init__(self, capture: Capture) -> None:
        capture = of_one_process(capture)
        tables = {name: _sorted(getattr(capture, name)) for name in Capture.TABLES if name not in _UNSORTED}
        work: Work = tables["work"]  # type: ignore[assignment]
        if len(work):
            tables["work"] = work.take(work.device == busiest_device(work.device, work.start_ns, work.end_ns))
        self.capture = replace(capture, **tables)  # type: ignore[arg-type]
        self.calls: Calls = self.capture.calls
        self.work: Work = self.capture.work
        self.call_of_work = self._link()

    def _link(self) -> Ints:
        launching = np.flatnonzero(np.isin(self.calls.kind, LAUNCHING) & (self.calls.correlation >= 0))
        if not len(launching) or not len(self.work):
            return np.full(len(self.work), -1, np.int64)
        order = launching[np.argsort(self.calls.correlation[launching], kind="stable")]
        keys = self.calls.correlation[order]
        place = np.searchsorted(keys, self.work.correlation)
        place = np.minimum(place, len(keys) - 1)
        found = (keys[place] == self.work.correlation) & (self.work.correlation >= 0)
        return np.where(found, order[place], -1)

    @cached_property
    def works_of_call(self) -> tuple[Ints, Ints]:
        """`(first, order)`: the work of call i is `order[first[i]:first[i + 1]]`, in the order of its start."""
        linked = np.flatnonzero(self.call_of_work >= 0)
        order = linked[np.argsort(self.call_of_work[linked], kind="stable")]
        counts = np.bincount(self.call_of_work[order], minlength=len(self.calls))
        return np.concatenate(([0], np.cumsum(counts))).astype(np.int64), order

    @cached_property
    def busy(self) -> Intervals:
        """When the device did anything: the union over its streams."""
        return intervals.union(self.work.start_ns, self.work.end_ns)

    @cached_property
    def span(self) -> tuple[int, int]:
        """First start and last end of everything recorded, host and device; (0, 0) of an empty recording."""
        tables = [t for t in (self.calls, self.work, self.capture.ops, self.capture.ranges) if len(t)]
        if not tables:
            return 0, 0
        return min(int(t.start_ns.min()) for t in tables), max(int(t.end_ns.max()) for t in tables)

    @cached_property
    def device_span(self) -> tuple[int, int]:
        """From the first start to the last end of device work; (0, 0) without any."""
        if not len(self.work):
            return 0, 0
        return int(self.work.start_ns.min()), int(self.work.end_ns.max())

    @cached_property
    def launch_ns(self) -> Ints:
        """(num_work,) start of the launching call.

        Work whose call was not recorded was launched before the recording began if nothing launched inside it ran
        earlier on its stream; else its own start stands in.
        """
        if not len(self.calls):
            return self.work.start_ns
        linked = self.call_of_work >= 0
        if not linked.any():  # the file links nothing: that says nothing about when work was launched
            return self.work.start_ns
        launched = np.where(linked, self.calls.start_ns[np.maximum(self.call_of_work, 0)], self.work.start_ns)
        for stream in np.unique(self.work.stream[~linked]):
            on_stream = self.work.stream == stream
            inside = np.flatnonzero(on_stream & linked)
            first = int(self.work.start_ns[inside[0]]) if len(inside) else np.iinfo(np.int64).max
            early = on_stream & ~linked & (self.work.start_ns < first)
            launched[early] = np.minimum(self.work.start_ns[early], self.calls.start_ns[0] - 1)
        return launched

    @cached_property
    def launch_delay_ns(self) -> Ints:
        """(num_linked,) time between a launch and the start of the work: how far the host runs ahead."""
        linked = self.call_of_work >= 0
        return (self.work.start_ns - self.launch_ns)[linked]

    @cached_property
    def steps(self) -> StepSpans | None:
        """Marked steps inside the recorded window; without marks the turns of the launch sequence; else the window."""
        start, end = self.span
        if end <= start:
            return None
        return self._marked_steps(start, end) or self._turns() or self._whole_window(start, end)

    def _turns(self) -> StepSpans | None:
        """Steps from repetition: at least three turns, so that one chance likeness makes no step."""
        repeats = self.repetition
        if len(repeats) < 4:
            return None
        bounds = self.calls.start_ns[self.call_of_work[self.launch_order[repeats]]]
        windows = self._device_windows(bounds[:-1], bounds[1:])
        return StepSpans(
            host_start_ns=bounds[:-1],
            host_end_ns=bounds[1:],
            window_start_ns=windows[0],
            window_end_ns=windows[1],
            first_cut=self._starts_dry(int(bounds[0])),
            index=np.full(len(bounds) - 1, -1, np.int64),
            origin="repetition",
            micro_batches=0.0,
            samples=-1.0,
        )

    def _marked_steps(self, start: int, end: int) -> StepSpans | None:
        steps = self.capture.steps
        inside = (steps.complete > 0) & (steps.start_ns < end) & (steps.end_ns > start)
        if len(self.calls):
            # A step that began before the first recorded call is cut: judging it would call the missing part idle.
            first, last = int(self.calls.start_ns.min()), int(self.calls.end_ns.max())
            inside &= (steps.end_ns > first) & (steps.start_ns < last)
        rows = np.flatnonzero(inside)
        if not len(rows):
            return None
        rows = rows[np.argsort(steps.start_ns[rows], kind="stable")]
        run, num_runs = _longest_run(steps.start_ns[rows], steps.end_ns[rows], steps.index[rows])
        after_break, rows = run.start > 0, rows[run]
        starts, ends = steps.start_ns[rows], steps.end_ns[rows]
        windows = self._device_windows(starts, ends)
        if after_break:  # what ran before belongs to another run: the pause between is no idle time of a step
            windows[0][0] = min(max(int(windows[0][0]), int(starts[0])), int(windows[1][0]))
        first_cut = after_break or self._starts_dry(int(starts[0]))
        if first_cut and len(rows) == 1 and self._first_launch_ran(int(starts[0])):
            windows[0][0] = starts[0]  # no other window is judged, and before its work the device was idle
        micro = steps.micro_batches[rows]
        samples = steps.samples[rows]
        return StepSpans(
            host_start_ns=starts,
            host_end_ns=ends,
            window_start_ns=windows[0],
            window_end_ns=windows[1],
            index=rows,
            origin="marks",
            micro_batches=float(micro[micro > 0].mean()) if (micro > 0).any() else 0.0,
            samples=float(samples[samples >= 0].mean()) if (samples >= 0).any() else -1.0,
            first_cut=first_cut,
            num_runs=num_runs,
        )

    def _device_windows(self, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
        if not len(self.work):
            return starts, ends
        step_of = step_index(starts, self.launch_ns)
        lasts = np.full(len(starts), np.iinfo(np.int64).min)
        known = step_of >= 0
        late = np.zeros_like(known)
        late[known] = self.launch_ns[known] >= ends[step_of[known]]
        np.maximum.at(lasts, step_of[known & ~late], self.work.end_ns[known & ~late])
        lasts = np.maximum.accumulate(np.where(lasts == np.iinfo(np.int64).min, starts, lasts))
        before = self.work.end_ns[~known]
        first = int(before.max()) if len(before) else int(max(starts[0], self.device_span[0]))
        begins = np.concatenate(([min(first, int(lasts[0]))], lasts[:-1]))
        return begins.astype(np.int64), lasts

    def _starts_dry(self, start: int) -> bool:
        """Whether no work was launched before the first step: when its window began is then not known."""
        return len(self.work) > 0 and not bool((self.launch_ns < start).any())

    def _first_launch_ran(self, start: int) -> bool:
        """Whether the first launch from then on has its work: where it was lost, what came before it is not known."""
        launches = np.flatnonzero(np.isin(self.calls.kind, LAUNCHING) & (self.calls.start_ns >= start))
        return bool(len(launches) and np.isin(launches[0], self.call_of_work))

    def _whole_window(self, start: int, end: int) -> StepSpans:
        window = self.device_span if len(self.work) else (start, end)
        one = {name: np.array([value], np.int64) for name, value in
               (("host_start_ns", start), ("host_end_ns", end), ("window_start_ns", window[0]),
                ("window_end_ns", window[1]), ("index", -1))}  # fmt: skip
        return StepSpans(origin="window", micro_batches=0.0, samples=-1.0, **one)  # type: ignore[arg-type]

    @cached_property
    def repetition(self) -> Ints:
        """Indices into the launching calls at which the launch sequence begins anew; empty where it does not repeat.

        CUDA-only recordings hold no step marks; the sequence of what a loop launches repeats all the same.
        """
        return find_repetition(self.work.name[self.launch_order])

    @cached_property
    def launch_order(self) -> Ints:
        """Indices into `work` of what was launched inside the recording, in the order of its launch."""
        linked = np.flatnonzero(self.call_of_work >= 0)
        return linked[np.lexsort((self.work.start_ns[linked], self.launch_ns[linked]))]


def _longest_run(starts: Ints, ends: Ints, index: Ints) -> tuple[slice, int]:
    """The longest run of steps that follow each other (the first of equals), and how many runs there are.

    A profiler that records again later leaves a pause of many steps between its cycles, and so does a lost mark: the
    loop ran on, unrecorded. A pause breaks the run when it is longer than three steps, or than half a step where the
    steps' own count jumps.
    """
    pause = starts[1:] - ends[:-1]
    usual = float(np.median(np.diff(starts))) if len(starts) > 1 else 0.0
    counted = np.diff(index)
    jumps = counted != np.median(counted) if len(counted) else counted.astype(bool)
    breaks = np.flatnonzero((pause > 3 * usual) | (jumps & (pause > usual / 2))) + 1
    bounds = np.concatenate(([0], breaks, [len(starts)]))
    longest = int(np.argmax(np.diff(bounds)))
    return slice(int(bounds[longest]), int(bounds[longest + 1])), len(bounds) - 1


def step_index(starts: Ints, times: Ints) -> NDArray[np.int64]:
    """For each time the step that had begun last; -1 before the first."""
    return np.searchsorted(starts, times, side="right").astype(np.int64) - 1
