"""Watched windows of a training run whose loop belongs to a Trainer: opened, ended, reported.

A window that has ended is read later, where a wait for the device and a second of diagnosis do no harm. Where windows
come again and again, every step of the run is timed as well, as in a `LongSession`, and outliers are billed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfdoctor.doors import session as sessions
from perfdoctor.doors.run_remarks import run_remarks
from perfdoctor.doors.session import Session, watch
from perfdoctor.errors import SessionError, UsageError
from perfdoctor.report.page import Report
from perfdoctor.report.tensorboard import scalars
from perfdoctor.units import NS_PER_MS
from perfdoctor.watch.long_run import LongClock
from perfdoctor.watch.outliers import Outlier, summarise
from perfdoctor.watch.sync_guard import allow_sync

_log = logging.getLogger("perfdoctor")
Scalars = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    """What a callback was given.

    `every_n_steps`: steps from the start of a window to that of the next; None: one window. `report_dir`: the folder
    for reports; None writes none.
    """

    warmup: int = 5
    active: int = 10
    every_n_steps: int | None = None
    report_dir: str | os.PathLike[str] | None = None
    profiled: bool | None = None

    def __post_init__(self) -> None:
        for name in ("warmup", "active", "every_n_steps"):
            value = getattr(self, name)
            if value is None and name == "every_n_steps":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r}: expected a whole number of steps, 1 or more")


@dataclass(slots=True, kw_only=True)
class Windows:
    """The windows of one run. `log(scalars, step)` sends figures to the Trainer's loggers; `rank` names the files."""

    options: WindowOptions
    log: Callable[[Scalars, int], None]
    rank: int = 0
    micro_batches: int = 1  # of an update, as far as the Trainer knows
    session: Session | None = field(default=None, init=False)  # that is running
    report: Report | None = field(default=None, init=False)  # of the newest window that was read
    _unread: Session | None = field(default=None, init=False)
    clock: LongClock | None = field(default=None, init=False)  # of the whole run, where there is an `every_n_steps`
    _first: int = field(default=0, init=False)  # the step at which the clock began
    _start: int | None = field(default=None, init=False)
    _is_over: bool = field(default=False, init=False)

    def check(self) -> None:
        """Before the run begins: that nobody else watches, and that reports can be written.

        Raises:
            SessionError: another session is running.
            UsageError: the folder for the reports cannot be made.
        """
        refuse_second_session()
        folder = self.options.report_dir
        if folder is not None:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"report_dir={os.fspath(folder)!r}: cannot make this folder ({error})") from error

    def begin(self, step: int) -> None:
        """The run begins at `step`: time it all through where windows come again. Outside any optimizer hook."""
        if self.options.every_n_steps is not None:
            self.clock, self._first = LongClock(), step
            self.clock.steps.expect(self.micro_batches)
            self.clock.install()
        self.open(step)

    @property
    def begun(self) -> bool:
        """Whether the run has begun."""
        return self._start is not None

    def between_steps(self) -> None:
        """A batch begins, and windows have ended and begun: the step it belongs to is slower if one is open."""
        if self.clock is not None:
            self.clock.window_open = sessions.running() is not None

    def next_of(self, iterator: Iterator[Any]) -> Any:
        """The next batch, its wait noted by whoever watches."""
        session, clock = self.session, self.clock
        fetch: Callable[[Iterator[Any]], Any] = next
        if session is not None and not session.done:
            fetch = session.recorder.batches.next_of
        return fetch(iterator) if clock is None else clock.next_of(iterator, fetch)

    def as_evaluation(self, run: Any) -> Any:
        """`run`, noted as an evaluation where the whole run is timed."""
        return run if self.clock is None else self.clock.happenings.as_evaluation(run)

    def as_checkpoint(self, write: Any) -> Any:
        """`write`, noted as a checkpoint where the whole run is timed."""
        return write if self.clock is None else self.clock.happenings.as_checkpoint(write)

    def epoch_ended(self) -> None:
        """What runs until the next epoch's first batch is the end of this one."""
        if self.clock is not None:
            self.clock.happenings.epoch_ended()

    def is_due(self, step: int) -> bool:
        """Whether a window is to begin at `step`, the Trainer's own count."""
        if self.session is not None or self._start is None or sessions.running() is not None:
            return False
        every = self.options.every_n_steps
        return every is not None and step - self._start >= every

    def open(self, step: int) -> Session:
        """Begin a window.

        Raises:
            SessionError: another session is running.
        """
        self.read(step)
        options = self.options
        session = watch(warmup=options.warmup, active=options.active, profiled=options.profiled)
        session.__enter__()
        self.session, self._start = session, step
        session.recorder.steps.expect(self.micro_batches)
        session.recorder.batches.patch_loaders()
        return session

    def set_apart(self) -> None:
        """What has run since the last step ended, an evaluation, belongs to no step."""
        if self.session is not None:
            self.session.recorder.set_apart()

    def end(self) -> None:
        """End the window that is open, if one is. It is kept until it is read."""
        session, self.session = self.session, None
        if session is None:
            return
        self._unread = session
        try:
            with allow_sync("perfdoctor: a window is over"):
                session.__exit__(None, None, None)
        except Exception as error:  # with a device in error, say: that error is the user's to see, not this one
            _log.warning("perfdoctor could not end the window that began at step %s: %r", self._start, error)

    def read(self, step: int) -> bool:
        """Report the window that has ended, in the folder and in the Trainer's loggers; False where there is none.

        What goes wrong in here (a full disk, a logger that fails) is logged as a warning: training goes on.
        """
        session, self._unread = self._unread, None
        if session is None:
            return False
        try:
            with allow_sync("perfdoctor: a window is over and is read"):
                self.report = session.diagnosis()
                figures = scalars(self.report, session.capture)
            self._write(self.report)
            self._log(figures, step)
        except Exception as error:
            _log.warning("perfdoctor could not report the window that began at step %s: %r", self._start, error)
        return self.report is not None

    def finish(self, step: int) -> bool:
        """The run is over: end and read the window, say of the whole run what its steps took and what the outliers are
        billed to. False where there is nothing new to say."""
        self.end()
        told = self.read(step)
        clock = self.clock
        if clock is None or self.report is None or self._is_over:
            return told
        self._is_over = True
        try:
            clock.remove()
            with allow_sync("perfdoctor: the steps of the run are read"):
                remarks = run_remarks(self.step_ns, self.watched, self.outliers)
            if remarks:
                self.report = self.report.with_advice(*remarks)
                self._write(self.report)
                self._log(self._run_figures(), step)
        except Exception as error:
            _log.warning("perfdoctor could not report the steps of the whole run: %r", error)
        return True

    def drop(self) -> None:
        """Take everything back and report nothing."""
        try:
            self.end()
        finally:
            self._unread = None
            if self.clock is not None:
                self.clock.remove()

    @property
    def step_ns(self) -> NDArray[np.int64]:
        """The duration of every step but the first, windows included; empty without `every_n_steps`."""
        return np.zeros(0, np.int64) if self.clock is None else self.clock.clock.durations()

    @property
    def watched(self) -> NDArray[np.bool_]:
        """Which of `step_ns` a window slowed."""
        return np.zeros(0, bool) if self.clock is None else self.clock.watched[1:]

    @property
    def outliers(self) -> tuple[Outlier, ...]:
        """The steps, by the Trainer's own count, that took far longer than the others, each with its bills."""
        found = () if self.clock is None else self.clock.outliers(self.options.warmup)
        return tuple(each._replace(step=each.step + self._first) for each in found)

    def _run_figures(self) -> Scalars:
        bare = self.step_ns[~self.watched]
        billed = {f"outlier_ms/{cause.replace(' ', '_')}": ns / NS_PER_MS for cause, _, ns in summarise(self.outliers)}
        return {"bare_step_ms": float(np.median(bare)) / NS_PER_MS, **billed}

    def _log(self, figures: Scalars, step: int) -> None:
        self.log({f"perfdoctor/{name}": value for name, value in figures.items()}, step)

    def _write(self, report: Report) -> None:
        if self.options.report_dir is None:
            return
        stem = "perfdoctor"
        if self.options.every_n_steps is not None:
            stem += f"-step{self._start or 0:06d}"
        if self.rank:
            stem += f"-rank{self.rank}"
        folder = Path(self.options.report_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{stem}.txt", report.to_text())
        write_whole(folder / f"{stem}.json", report.to_json())


def refuse_second_session() -> None:
    """Raises SessionError where a session is running."""
    if sessions.running() is not None:
        raise SessionError(
            "another perfdoctor session is running (a `with perfdoctor.watch()` round the fit, `perfdoctor run`, or a "
            "second callback): a loop is watched by one at a time; take one of them away"
        )


def write_whole(path: Path, text: str) -> None:
    """The file is there with all of `text`, or as it was before."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        part.write_text(text, "utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class WatchedRun:
    """What a Trainer's callback tells of the run that it watches in windows. Mixed into the callbacks."""

    _windows: Windows | None

    @property
    def report(self) -> Report | None:
        """Of the newest window that is over; None before."""
        return self._windows.report if self._windows is not None else None

    @property
    def outliers(self) -> tuple[Outlier, ...]:
        """With `every_n_steps`: the steps of the whole run that took far longer than the others, each billed to what
        happened in it."""
        return self._windows.outliers if self._windows is not None else ()

    @property
    def step_ns(self) -> NDArray[np.int64]:
        """With `every_n_steps`: the duration of every step but the first, windows included. Shape (num_steps - 1,)."""
        return self._windows.step_ns if self._windows is not None else np.zeros(0, np.int64)

    @property
    def watched(self) -> NDArray[np.bool_]:
        """Which of `step_ns` a window slowed. Shape (num_steps - 1,)."""
        return self._windows.watched if self._windows is not None else np.zeros(0, bool)
