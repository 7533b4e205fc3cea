"""A whole training run: bare step times all through, a recorded window every so many steps, outliers billed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from perfdoctor.doors.run_remarks import run_remarks
from perfdoctor.doors.session import Session, recording_of
from perfdoctor.errors import UsageError
from perfdoctor.record.call_site import HitLog
from perfdoctor.record.capture import Capture
from perfdoctor.report.page import Report
from perfdoctor.units import format_ms
from perfdoctor.watch.long_run import LongClock
from perfdoctor.watch.outliers import Outlier
from perfdoctor.watch.plan import Plan
from perfdoctor.watch.recorder import Recorder
from perfdoctor.watch.sync_guard import allow_sync

# Each holds two recordings on disk until the end: beyond this every second window goes, and they come half as often.
_MOST_WINDOWS = 16


class LongRun:
    """Watches a run of any length. For loops of your own use `perfdoctor.watch(every_n_steps=...)`.

    `start` and `stop` go round the loop; `between_steps` is called before each batch, outside any optimizer hook: there
    windows begin and end. The device is waited for at the edges of a window, nowhere else.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        every_n_steps: int | None = None,
        *,
        first: Recorder | None = None,
        hits: HitLog | None = None,
        profiled: bool | None = None,
    ) -> None:
        """`every_n_steps`: from the start of a window to that of the next; None: no windows. `first`: the recorder of
        a window that somebody else starts and stops.

        Raises:
            UsageError: `every_n_steps` is shorter than a window, or no whole number.
        """
        self.plan = plan or Plan()
        self.every_n_steps = every_n_steps
        self._hits, self._profiled = hits, profiled
        if every_n_steps is not None:
            _check_interval(every_n_steps, self._new_recorder())
        self._clock = LongClock()
        self._first = first
        self._open: Recorder | None = None
        self._closed: list[tuple[int, Recorder]] = []  # (step at which it began, recorder)
        self._next = 0 if first is None or every_n_steps is None else every_n_steps
        self._read: dict[int, tuple[Capture, Report]] = {}

    def _new_recorder(self) -> Recorder:
        return Recorder(self.plan, self._hits, self._profiled)

    # ---- while the loop runs ----

    def start(self) -> None:
        """Begin to time."""
        self._clock.window_open = self._first is not None
        self._clock.install()

    def stop(self) -> None:
        """Take everything back. Safe to call twice."""
        try:
            self._close()
        finally:
            self._clock.remove()

    def between_steps(self) -> None:
        """A batch is about to be fetched: the place where a window may begin or end."""
        recorder = self._open
        if recorder is not None and recorder.over:
            self._close()
        self._clock.window_open = self._open is not None or (self._first is not None and not self._first.over)
        if self.every_n_steps is not None and not self._clock.window_open and self.num_steps >= self._next:
            self._begin()

    def next_of(self, iterator: Iterator[Any], fetch: Callable[[Iterator[Any]], Any]) -> Any:
        """The next batch, by `fetch(iterator)`, with everything that wants to know about it told."""
        self.between_steps()
        inner = fetch if self._open is None else self._open.batches.next_of
        return self._clock.next_of(iterator, inner)

    def mark(self) -> None:
        """A step ends here, by the user's word."""
        self._clock.steps.mark()
        if self._open is not None:
            self._open.steps.mark()
        self.between_steps()

    def _begin(self) -> None:
        recorder = self._new_recorder()
        with allow_sync("perfdoctor: a window begins"):
            recorder.start()
        if self._first is None:
            recorder.batches.patch_loaders()
        self._open, self._clock.window_open = recorder, True
        self._closed.append((self.num_steps, recorder))
        assert self.every_n_steps is not None
        self._next = self.num_steps + self.every_n_steps

    def _close(self) -> None:
        recorder, self._open = self._open, None
        if recorder is None:
            return
        recorder.stop()
        if len(self._closed) >= _MOST_WINDOWS and self.every_n_steps is not None:
            self._closed = self._closed[::2]
            self.every_n_steps *= 2
            self._next = self._closed[-1][0] + self.every_n_steps

    # ---- afterwards ----

    @property
    def num_steps(self) -> int:
        """Steps that have ended."""
        return self._clock.clock.num_steps

    @property
    def step_ns(self) -> NDArray[np.int64]:
        """The duration of every step but the first, windows included. Shape (num_steps - 1,)."""
        return self._clock.clock.durations()

    @property
    def watched(self) -> NDArray[np.bool_]:
        """Which of `step_ns` a window slowed. Shape (num_steps - 1,)."""
        return self._clock.watched[1:]

    @property
    def outliers(self) -> tuple[Outlier, ...]:
        """The steps that took far longer than the others, each billed to what happened in it."""
        return self._clock.outliers(self.plan.warmup)

    @property
    def captures(self) -> tuple[Capture, ...]:
        """The recordings of the windows that were long enough to hold a step. Waits for the device."""
        return tuple(capture for capture, _ in self._windows())

    @property
    def windows(self) -> tuple[Report, ...]:
        """A diagnosis of each window, in the order of the run; `source` names its first step. Waits for the device."""
        return tuple(report for _, report in self._windows())

    def _windows(self) -> list[tuple[Capture, Report]]:
        from perfdoctor.diagnose import diagnose

        for step, recorder in self._closed:
            if recorder is self._open or step in self._read or not any(row.complete for row in recorder.rows):
                continue
            capture = recording_of(recorder)
            report = Report.of(replace(diagnose(capture), source=f"window at step {step}"), (capture,))
            self._read[step] = capture, report
        kept = {step for step, _ in self._closed}
        return [self._read[step] for step in sorted(kept & self._read.keys())]

    def remarks(self) -> tuple[str, ...]:
        """The run in sentences, for the report: its steps, what the outliers cost, how the windows differ."""
        lines = run_remarks(self.step_ns, self.watched, self.outliers)
        return (*lines, *(f"{report.source}: {_short(report)}" for report in self.windows)) if lines else ()


class LongSession(Session):
    """A session over a whole run: the first window is the session's own, others follow every `every_n_steps`."""

    def __init__(
        self, plan: Plan, *, every_n_steps: int, hits: HitLog | None = None, profiled: bool | None = None
    ) -> None:
        super().__init__(plan, hits=hits, profiled=profiled)
        self._long = LongRun(plan, every_n_steps, first=self.recorder, hits=hits, profiled=profiled)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            if self._recording:
                self._long.start()
        except BaseException:
            self._release()
            raise
        return self

    def _stop(self) -> None:
        try:
            self._long.stop()  # before the recorder, whose patches lie underneath
        finally:
            super()._stop()

    def _fetch(self, iterator: Iterator[Any]) -> Any:
        return self._long.next_of(iterator, super()._fetch) if self._recording else super()._fetch(iterator)

    def step(self) -> None:
        """Say that a step ends here."""
        super().step()
        if self._recording:
            self._long.mark()

    def diagnosis(self) -> Report:
        """That of the first window, with remarks on the whole run and its other windows."""
        report = super().diagnosis()
        return report.with_advice(*self._long.remarks())

    @property
    def windows(self) -> tuple[Report, ...]:
        """A diagnosis of each window, the session's own first. Waits for the device."""
        from perfdoctor.diagnose import diagnose

        first = Report.of(replace(diagnose(self.capture), source="window at step 0"), (self.capture,))
        return (first, *self._long.windows)

    @property
    def outliers(self) -> tuple[Outlier, ...]:
        """The steps that took far longer than the others, each billed to what happened in it."""
        return self._long.outliers

    @property
    def step_ns(self) -> NDArray[np.int64]:
        """The duration of every step but the first, windows included. Shape (num_steps - 1,)."""
        return self._long.step_ns

    @property
    def watched(self) -> NDArray[np.bool_]:
        """Which of `step_ns` a window slowed. Shape (num_steps - 1,)."""
        return self._long.watched


def _check_interval(every_n_steps: object, recorder: Recorder) -> None:
    shortest = recorder.plan.total(recorder.stages)
    if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < shortest:
        raise UsageError(
            f"every_n_steps={every_n_steps!r}: a window takes {shortest} steps; give a whole number from there up, "
            "say 1000, or shorten the window with warmup= and active="
        )


def _short(report: Report) -> str:
    step = format_ms(report.step.median_ns) if report.step is not None else "no step timed"
    worst = report.findings[0] if report.findings else None
    return f"{step}, first finding {worst.code}" if worst is not None else f"{step}, nothing found"


__all__ = ["LongRun", "LongSession"]
