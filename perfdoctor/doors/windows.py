"""Watched windows of a training run whose loop belongs to a Trainer: opened, ended, reported.

A window that has ended is read later, where a wait for the device and a second of diagnosis do no harm.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from perfdoctor.doors import session as sessions
from perfdoctor.doors.session import Session, watch
from perfdoctor.errors import SessionError, UsageError
from perfdoctor.report.page import Report
from perfdoctor.report.tensorboard import scalars
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
    session: Session | None = field(default=None, init=False)  # that is running
    report: Report | None = field(default=None, init=False)  # of the newest window that was read
    _unread: Session | None = field(default=None, init=False)
    _start: int | None = field(default=None, init=False)

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
            self.log({f"perfdoctor/{name}": value for name, value in figures.items()}, step)
        except Exception as error:
            _log.warning("perfdoctor could not report the window that began at step %s: %r", self._start, error)
        return self.report is not None

    def drop(self) -> None:
        """Take everything back and report nothing."""
        self.end()
        self._unread = None

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
