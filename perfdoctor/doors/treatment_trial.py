"""`perfdoctor trial --treat`: treatments on trial in an unmodified script, in a throw-away run.

The script is watched first, so that the treatments of what was found come first. One that dies while a treatment is on
(out of memory, say) is that treatment's Verdict; the script is run again for the treatments that are left.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from perfdoctor.diagnose import diagnose
from perfdoctor.diagnose.finding import Diagnosis
from perfdoctor.doors.script import ScriptStopped, as_main, execute_program, load_program
from perfdoctor.doors.session import Session
from perfdoctor.doors.trial import files_of
from perfdoctor.errors import SessionError, TrialRefused
from perfdoctor.record.call_site import HitLog
from perfdoctor.treat.cures import treatments_for
from perfdoctor.treat.switches import TREATMENTS, treatment
from perfdoctor.treat.treatment import Treatment
from perfdoctor.trial.live_loop import LiveLoop
from perfdoctor.trial.sandbox import Sandbox
from perfdoctor.trial.treatments_trial import TreatmentLimits, TreatmentsTrial
from perfdoctor.trial.verdict import Verdict, untried
from perfdoctor.watch.clocks import stamp_now
from perfdoctor.watch.plan import Plan
from perfdoctor.watch.steps import StepDetector

_MOST_RUNS = 4
# Compiles for minutes: only where it is asked for.
_DEAR = "compile_max_autotune"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreatmentOptions:
    """What to try and how. `names`: all that fit where empty; `hits` is the log of an emulated device."""

    names: tuple[str, ...] = ()
    module: bool = False
    warmup: int = 5
    active: int = 10
    limits: TreatmentLimits = field(default_factory=TreatmentLimits)
    hits: HitLog | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TreatedScript:
    """What came of the treatments, and the diagnosis that chose them."""

    verdicts: tuple[Verdict, ...]
    diagnosis: Diagnosis
    notes: tuple[str, ...] = ()


def try_treatments(
    target: str, arguments: Sequence[str] = (), options: TreatmentOptions | None = None
) -> TreatedScript:
    """Run `target` as `python` would, watch its loop, then try treatments on it; its files are thrown away.

    Raises:
        UsageError: no such script or treatment.
        SessionError: the script ended, or failed, before the first treatment was tried.
        TrialRefused: several ranks, which could not agree on what to switch when.
    """
    options = options or TreatmentOptions()
    left = [treatment(name) for name in options.names] or [each for each in TREATMENTS if each.name != _DEAR]
    until = time.perf_counter() + options.limits.seconds
    verdicts: list[Verdict] = []
    notes: list[str] = []
    diagnosis: Diagnosis | None = None
    for _ in range(_MOST_RUNS):
        seconds = max(until - time.perf_counter(), 1.0)
        run = _Run(replace(options, limits=replace(options.limits, seconds=seconds)), left, verdicts, diagnosis)
        run.execute(target, arguments)
        found, diagnosis = run.verdicts, run.diagnosis
        notes += run.notes
        del run  # and with it all that is left of the script: the next run needs the memory
        _free()
        verdicts += found
        tried = {verdict.treatment for verdict in verdicts}
        left = [each for each in left if each.name not in tried]
        if not left or not found:
            break
    if not verdicts or diagnosis is None:
        raise SessionError(
            f"{target} ended before a treatment was tried: it needs some 50 steps to be watched and some hundred more"
        )
    verdicts += [untried(each.name, "the script ended first; let it run longer") for each in left]
    if not options.names:
        verdicts.append(untried(_DEAR, f"it compiles for minutes; ask for it by name: --treat={_DEAR}"))
    found_at = replace(diagnosis, source=target)
    return TreatedScript(verdicts=tuple(verdicts), diagnosis=found_at, notes=tuple(dict.fromkeys(notes)))


class _Run:
    """One run of the script: watched first where nothing is known of it yet."""

    def __init__(
        self,
        options: TreatmentOptions,
        treatments: Sequence[Treatment],
        earlier: Sequence[Verdict],
        diagnosis: Diagnosis | None,
    ) -> None:
        self.diagnosis = diagnosis
        self._options = options
        self._treatments = treatments
        self._earlier = earlier
        self._live = LiveLoop()
        self._trial: TreatmentsTrial | None = None
        self._problem: Exception | None = None
        self._box = Sandbox()

    @property
    def verdicts(self) -> list[Verdict]:
        return [] if self._trial is None else self._trial.verdicts

    @property
    def notes(self) -> list[str]:
        return files_of(self._box)

    def execute(self, target: str, arguments: Sequence[str]) -> None:
        """Run the script until every treatment is judged, or to its end; everything is as before then."""
        program = load_program(target, module=self._options.module)
        with ExitStack() as stack:
            stack.enter_context(self._box)
            stack.enter_context(as_main(program, arguments))
            errors = stack.enter_context(_caught())
            stack.callback(self._live.remove)
            self._live.prepare()
            self._detect(stack)
            stack.callback(self._close)
            exit_code, _ = execute_program(program)
            if self._trial is not None and (errors or exit_code):
                self._trial.fail(errors[0] if errors else RuntimeError(f"the script ended with exit code {exit_code}"))
            errors.clear()
        if self._problem is not None:
            raise self._problem

    def _detect(self, stack: ExitStack) -> None:
        """Steps go to the trial: after the phases of a session, or from the start."""
        if self.diagnosis is not None:
            self._begin()
            steps = StepDetector(stamp_now, self._step)
            stack.callback(steps.remove)
            steps.install()
            return
        plan = Plan(warmup=self._options.warmup, active=self._options.active)
        session = Session(plan, hits=self._options.hits)
        session.recorder.following = self._step
        session.recorder.finished = lambda: self._watched(session)
        stack.enter_context(session)
        session.recorder.batches.patch_loaders()

    def _watched(self, session: Session) -> None:
        """The phases are over: what was found says what to try first."""
        try:
            _refuse_ranks()
            self.diagnosis = diagnose(session.assembled())
            self._begin()
        except Exception as error:  # raised by execute(), once the script is stopped
            self._problem = error
            _stop()

    def _begin(self) -> None:
        assert self.diagnosis is not None
        chosen = self._treatments if self._options.names else _ordered(self._treatments, self.diagnosis)
        by_name = {each.name: each for each in TREATMENTS}
        earlier = [(by_name[v.treatment], v) for v in self._earlier if v.treatment in by_name]
        self._live.install()
        self._trial = TreatmentsTrial(chosen, self._live, limits=self._options.limits, earlier=earlier, ended=_stop)

    def _step(self, stamp: Any) -> None:
        if self._trial is not None:
            self._trial.step_ended(stamp)

    def _close(self) -> None:
        if self._trial is not None:
            self._trial.close()


def _ordered(treatments: Sequence[Treatment], diagnosis: Diagnosis) -> list[Treatment]:
    """Those that cure what was found first, by what would come back; then the others, those that compile last."""
    codes = [finding.code for finding in diagnosis.findings]
    names = list(dict.fromkeys(name for code in codes for name in treatments_for(code)))
    last = len(names)

    def place(each: Treatment) -> tuple[int, bool]:
        return (names.index(each.name) if each.name in names else last, each.name.startswith("compile"))

    return sorted(treatments, key=place)


def _refuse_ranks() -> None:
    distributed: Any = sys.modules["torch"].distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise TrialRefused(
            f"this loop runs on {distributed.get_world_size()} ranks, which could not agree on what to switch when: "
            "try treatments on one rank"
        )


def _free() -> None:
    """Give back what the script's objects held: the next run needs it."""
    gc.collect()
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _stop() -> None:
    raise ScriptStopped


@contextmanager
def _caught() -> Iterator[list[BaseException]]:
    """What the script died of; it is printed as ever."""
    errors: list[BaseException] = []
    before: Callable[..., Any] = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        errors.append(error)
        before(kind, error, trace)

    sys.excepthook = hook
    try:
        yield errors
    finally:
        if sys.excepthook is hook:
            sys.excepthook = before
