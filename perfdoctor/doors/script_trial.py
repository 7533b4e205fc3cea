"""`perfdoctor trial`: an unmodified script watched, then tried without each suspect, in a throw-away run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from perfdoctor.doors.process_settings import kept_settings
from perfdoctor.doors.script import as_main, execute_program, load_program
from perfdoctor.doors.script_end import ended_inside
from perfdoctor.doors.script_errors import caught_errors
from perfdoctor.doors.script_stop import ScriptStop
from perfdoctor.doors.session import Session
from perfdoctor.doors.trial import LiveTrial, failure_text, files_of, refuse_ranks
from perfdoctor.errors import INTERRUPTED, SessionError, TrialRefused
from perfdoctor.record.call_site import HitLog
from perfdoctor.report.progress import ProgressLine
from perfdoctor.trial.broken_arm import BrokenArm, others_undecided, said_of
from perfdoctor.trial.outcome import TrialOutcome
from perfdoctor.trial.runner import Limits
from perfdoctor.trial.sandbox import Sandbox
from perfdoctor.trial.suspects import MOST_SUSPECTS
from perfdoctor.watch.plan import Plan

_MOST_RUNS = 4  # of a script that dies of what is tried on it


class ScriptFailed(SessionError):
    """The script failed before there was anything to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """How to try a script. `hits` is the log of an emulated device."""

    module: bool = False
    warmup: int = 5
    active: int = 10
    limits: Limits = field(default_factory=Limits)
    suspects: int = MOST_SUSPECTS
    hits: HitLog | None = None
    profiled: bool | None = None
    progress: ProgressLine | None = None  # says how far the phases and the trial are


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptTrial:
    """What came of a script on trial. `exit_code` is its own, 0 where it was stopped on purpose; `broken`: what was on
    when it died."""

    outcome: TrialOutcome
    exit_code: int
    stopped: bool
    broken: BrokenArm | None = None
    spent_s: float = 0.0  # on trial, without the watched phases


def run_trial(target: str, arguments: Sequence[str] = (), options: TrialOptions | None = None) -> ScriptTrial:
    """Run `target` as `python` would, watch its loop, then try it without each suspect; its files are thrown away.

    A script that dies while a suspect is off is run again without that one, where others are left to judge.

    Raises:
        UsageError: there is no such script or module, or it does not compile.
        SessionError: the script ended before the trial began.
        ScriptFailed: it failed before that.
        TrialRefused: a trial of this loop would be wrong; several ranks, say.
    """
    options = options or TrialOptions()
    refuse_ranks()  # before anything runs, where torchrun started us
    run = _run_once(target, arguments, options, ())
    broken: list[BrokenArm] = []
    while run.broken is not None and others_undecided(run.broken, run.outcome.arms) and len(broken) < _MOST_RUNS - 1:
        broken.append(run.broken)
        left = int(options.limits.seconds - run.spent_s)
        if left < 1:
            break
        options = replace(options, limits=replace(options.limits, seconds=float(left)))
        print(f"perfdoctor: the script failed with {run.broken.name}: run again without that", file=sys.stderr)
        free_memory()
        try:
            run = _run_once(target, arguments, options, broken)
        except (SessionError, TrialRefused):  # it ended earlier this time
            break
    return run


def _run_once(target: str, arguments: Sequence[str], options: TrialOptions, broken: Sequence[BrokenArm]) -> ScriptTrial:
    program = load_program(target, module=options.module)
    session = Session(Plan(warmup=options.warmup, active=options.active), hits=options.hits, profiled=options.profiled)
    if options.progress is not None:
        session.tell(options.progress)
    stop = ScriptStop(throw_away=True)
    ended = _Ended(session, stop)
    live = LiveTrial(session, options.limits, suspects=options.suspects, ended=ended, restored=False, broken=broken)
    ended.check_each_step()
    box = Sandbox()
    with ExitStack() as stack:
        stack.enter_context(kept_settings())
        stack.enter_context(box)
        stack.enter_context(as_main(program, arguments))
        stack.enter_context(ended_inside(lambda: stop.status is not None))
        errors = stack.enter_context(caught_errors())
        stack.enter_context(session)
        stack.callback(live.close)
        session.recorder.batches.patch_loaders()
        exit_code, stopped = stop.run(partial(execute_program, program))
        spent_s = live.spent_s
        if exit_code not in (0, INTERRUPTED):
            live.fail(failure_text(errors[0] if errors else None, exit_code))
        errors.clear()
    if exit_code == INTERRUPTED and not live.begun:
        raise KeyboardInterrupt
    if exit_code and not live.begun:
        raise ScriptFailed(f"{target} failed (exit code {exit_code}) before the trial began; what it said stands above")
    outcome = live.outcome()
    for each in broken:
        if each.finding is None or not each.prediction:  # else the suspect has been refused
            outcome = said_of(each, outcome)
    outcome = replace(
        outcome,
        diagnosis=replace(outcome.diagnosis, source=target),
        notes=(*outcome.notes, *files_of(box)),
    )
    return ScriptTrial(outcome=outcome, exit_code=exit_code, stopped=stopped, broken=live.broken, spent_s=spent_s)


def free_memory() -> None:
    """Give back what the script's objects held: its next run needs it."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


class _Ended:
    """Ends the script; again at each later step, where it catches what ends it (a bare `except:`)."""

    def __init__(self, session: Session, stop: ScriptStop) -> None:
        self._recorder = session.recorder
        self._stop = stop

    def __call__(self) -> None:
        self._recorder.following = lambda _: self._stop()
        self._recorder.steps.idle = False
        self._stop()

    def check_each_step(self) -> None:
        """Of the trial: a script that has caught a KeyboardInterrupt ends there."""
        following = self._recorder.following

        def checked(stamp: Any) -> None:
            self._stop.check()
            if following is not None:
                following(stamp)

        self._recorder.following = checked
