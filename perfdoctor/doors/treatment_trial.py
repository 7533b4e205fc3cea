"""`perfdoctor trial --treat`: treatments on trial in an unmodified script, in a throw-away run.

The script is watched first, so that the treatments of what was found come first. One that dies while a treatment is on
(out of memory, say) is that treatment's Verdict; the script is run again for the treatments that are left. What cannot
be judged in one process is judged in several, the script run from its start in each (process_rounds.py).
"""

from __future__ import annotations

import os
import shlex
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from perfdoctor.diagnose import diagnose
from perfdoctor.diagnose.finding import Diagnosis
from perfdoctor.doors.process_settings import kept_settings
from perfdoctor.doors.script import as_main, execute_program, load_program
from perfdoctor.doors.script_end import ended_inside
from perfdoctor.doors.script_errors import caught_errors
from perfdoctor.doors.script_stop import ScriptStop
from perfdoctor.doors.script_trial import free_memory
from perfdoctor.doors.session import Session
from perfdoctor.doors.treatment_processes import TreatmentProcesses
from perfdoctor.doors.trial import failure_text, files_of, refuse_ranks
from perfdoctor.errors import INTERRUPTED, SessionError
from perfdoctor.record.call_site import HitLog
from perfdoctor.report.progress import ProgressLine
from perfdoctor.treat.cures import OF_THE_LOADER, treatments_for
from perfdoctor.treat.switches import TREATMENTS, treatment
from perfdoctor.treat.treatment import Treatment
from perfdoctor.trial.live_loop import LiveLoop
from perfdoctor.trial.live_obstacles import kept_state, undecided
from perfdoctor.trial.process_rounds import Candidate, ProcessRounds
from perfdoctor.trial.process_run import ProcessOrder
from perfdoctor.trial.sandbox import Sandbox
from perfdoctor.trial.treatment_time import TreatmentLimits
from perfdoctor.trial.treatments_trial import TreatmentsTrial
from perfdoctor.trial.verdict import Verdict, untried
from perfdoctor.watch.clocks import stamp_now
from perfdoctor.watch.plan import Plan, Stage
from perfdoctor.watch.steps import StepDetector

_MOST_RUNS = 4
_OUR_HOOKS = "Using `torch.compile.module.` when there are global hooks"  # those that look for the model
_ONLY_BY_NAME = {"compile_max_autotune": "it compiles for minutes; ask for it by name (--treat=compile_max_autotune)"}
_ONE_OF_THEM = "one of them cannot be switched in a running process"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreatmentOptions:
    """What to try and how. `names`: all that fit where empty; `hits` is the log of an emulated device."""

    names: tuple[str, ...] = ()
    module: bool = False
    warmup: int = 5
    active: int = 10
    limits: TreatmentLimits = field(default_factory=TreatmentLimits)
    hits: HitLog | None = None
    progress: ProgressLine | None = None  # says how far the phases and the trial are


@dataclass(frozen=True, slots=True, kw_only=True)
class TreatedScript:
    """What came of the treatments, and the diagnosis that chose them."""

    verdicts: tuple[Verdict, ...]
    diagnosis: Diagnosis
    notes: tuple[str, ...] = ()
    exit_code: int = 0  # the script's own, where it ended by itself with no treatment on


def try_treatments(
    target: str, arguments: Sequence[str] = (), options: TreatmentOptions | None = None
) -> TreatedScript:
    """Run `target` as `python` would, watch its loop, then try treatments on it; its files are thrown away.

    Raises:
        UsageError: no such script or treatment.
        SessionError: the script ended, or failed, before the first treatment was tried.
        KeyboardInterrupt: before anything was judged; later, what there is by then is given.
        TrialRefused: several ranks, which could not agree on what to switch when.
    """
    options = options or TreatmentOptions()
    refuse_ranks()  # before anything runs, where torchrun started us
    search = _Search(target, tuple(arguments), options)
    try:
        search.try_live()
        search.try_processes()
    except KeyboardInterrupt:
        search.interrupt()
    return search.result()


class _Search:
    """The way through the treatments: blocks in one process first, then processes, then what there is to say."""

    def __init__(self, target: str, arguments: tuple[str, ...], options: TreatmentOptions) -> None:
        self._target = target
        self._arguments = arguments
        self._options = options
        self._left = [treatment(name) for name in options.names] or list(TREATMENTS)
        self._until = time.perf_counter() + options.limits.seconds
        self._verdicts: list[Verdict] = []
        self._deferred: dict[str, str] = {}  # treatment -> why it is tried in processes
        self._notes: list[str] = []
        self._diagnosis: Diagnosis | None = None
        self._failure, self._exit_code = "", 0  # of the script, with no treatment on
        self._why_left = "the script ended first; let it run longer"
        self._barred = False  # from a second run in this process
        self._environment = dict(os.environ)  # of now: the script and torch's compiler add to it as they run

    def try_live(self) -> None:
        """Run the script, again where it dies of a treatment, until each treatment is judged or deferred."""
        for number in range(_MOST_RUNS):
            seconds = max(self._until - time.perf_counter(), 1.0)
            options = replace(self._options, limits=replace(self._options.limits, seconds=seconds))
            run = _Run(options, self._left, self._verdicts, self._diagnosis, again=number > 0)
            run.execute(self._target, self._arguments)
            if run.barred:
                self._bar(run.failure)
            elif run.failure:
                self._failure, self._exit_code = run.failure, run.exit_code
            interrupted = run.interrupted
            found, deferred, self._diagnosis = run.verdicts, run.deferred, run.diagnosis
            self._notes += run.notes
            del run  # and with it all that is left of the script: the next run needs the memory
            free_memory()
            self._verdicts += found
            self._deferred.update((each.name, why) for each, why in deferred)
            tried = {verdict.treatment for verdict in self._verdicts} | set(self._deferred)
            self._left = [each for each in self._left if each.name not in tried]
            if interrupted:
                raise KeyboardInterrupt
            if not self._left or not (found or deferred):
                break
        if self._diagnosis is None or not (self._verdicts or self._deferred):
            how = f"failed ({self._failure})" if self._failure else "ended"
            plan = Plan(warmup=self._options.warmup, active=self._options.active)
            watched = plan.total((Stage.WARMUP, Stage.BARE, Stage.SITES, Stage.LIGHT, Stage.FULL))
            raise SessionError(
                f"{self._target} {how} before a treatment was tried: some {watched} steps are watched "
                "(--warmup, --active), and each treatment takes some hundred; let it run longer"
            )

    def _bar(self, failure: str) -> None:
        self._why_left = f"the script could not be run a second time in one process ({failure})"
        self._barred = True

    def interrupt(self) -> None:
        """Ctrl-C was pressed: nothing more is tried. Raises KeyboardInterrupt where nothing was judged."""
        if self._diagnosis is None or not self._verdicts:
            raise KeyboardInterrupt
        judged = {verdict.treatment for verdict in self._verdicts}
        names = [name for name in self._deferred if name not in judged]
        self._left += [treatment(name) for name in names]
        self._failure, self._exit_code = "", INTERRUPTED
        self._why_left = "interrupted"

    def try_processes(self) -> None:
        """Those deferred, and those on which one process gave no verdict, in processes; then the best together."""
        unsure = {v.treatment: (v, why) for v in self._verdicts if (why := undecided(v)) and not v.is_set}
        reasons = self._deferred | {name: why for name, (_, why) in unsure.items()}
        if not reasons:
            return
        order = ProcessOrder(
            target=self._target,
            arguments=self._arguments,
            module=self._options.module,
            emulated=self._options.hits is not None,
        )
        with TreatmentProcesses(order, self._environment, lambda: self._until - time.perf_counter()) as processes:
            rounds = ProcessRounds(processes.run, until=self._until, most_rounds=self._options.limits.rounds)
            found = rounds.judge([Candidate(treatments=(treatment(name),), why=why) for name, why in reasons.items()])
            self._take(found, {name: verdict for name, (verdict, _) in unsure.items()})
            best = self._best_of_both({verdict.treatment for verdict in found})
            if best:
                self._verdicts += rounds.judge([Candidate(treatments=best, why=_ONE_OF_THEM)])
        self._notes += [*rounds.notes, *_told(rounds.num_processes)]

    def _take(self, found: Sequence[Verdict], before: dict[str, Verdict]) -> None:
        """Verdicts of processes in place of those of one process, unless the processes gave none."""
        for verdict in found:
            earlier = before.get(verdict.treatment)
            if earlier is None:
                self._verdicts.append(verdict)
                continue
            reached = verdict.saving is not None or not verdict.reason.startswith("not tried")
            reason = f"{earlier.reason}; in processes of its own {verdict.reason}"
            self._verdicts[self._verdicts.index(earlier)] = verdict if reached else replace(earlier, reason=reason)

    def _best_of_both(self, in_processes: set[str]) -> tuple[Treatment, ...]:
        """The accepted ones, by what they save, where one process was not enough to try them together."""
        single = [v for v in self._verdicts if v.accepted and v.saving is not None and not v.is_set]
        accepted = sorted(single, key=lambda v: -v.saved_ns)
        if len(accepted) < 2 or not any(v.treatment in in_processes for v in accepted):
            return ()
        names = [v.treatment for v in accepted]
        compiled = [name for name in names if name.startswith("compile")]
        return tuple(treatment(name) for name in names if name not in compiled[1:])

    def result(self) -> TreatedScript:
        """What came of all."""
        assert self._diagnosis is not None
        why = f"the script failed first ({self._failure})" if self._failure else self._why_left
        if self._barred and self._left:
            self._notes.append(f"to try those left in a run of their own: {self._command()}")
        verdicts = self._verdicts + [untried(each.name, why) for each in self._left]
        found_at = replace(self._diagnosis, source=self._target)
        return TreatedScript(
            verdicts=tuple(verdicts),
            diagnosis=found_at,
            notes=tuple(dict.fromkeys(self._notes)),
            exit_code=self._exit_code,
        )

    def _command(self) -> str:
        words = ["perfdoctor", "trial", f"--treat={','.join(each.name for each in self._left)}"]
        words += ["--device", "emulated"] if self._options.hits is not None else []
        words += ["-m"] if self._options.module else []
        return shlex.join([*words, self._target, *self._arguments])


def _told(num_processes: int) -> list[str]:
    if not num_processes:
        return []
    return [
        f"{num_processes} process{'es' * (num_processes > 1)} ran the script from its start, seeded alike, as it is "
        "and treated in turn; each was stopped after its timed steps, what it wrote thrown away"
    ]


class _Run:
    """One run of the script: watched first where nothing is known of it yet."""

    def __init__(
        self,
        options: TreatmentOptions,
        treatments: Sequence[Treatment],
        earlier: Sequence[Verdict],
        diagnosis: Diagnosis | None,
        *,
        again: bool = False,
    ) -> None:
        """`again`: the script has run in this process before."""
        self.diagnosis = diagnosis
        self._again = again
        self.failure = ""  # what the script died of with no treatment on
        self.exit_code = 0  # its own then
        self.interrupted = False  # by Ctrl-C: no fault of a treatment
        self._options = options
        self._treatments = treatments
        self._earlier = earlier
        self._live = LiveLoop()
        self._trial: TreatmentsTrial | None = None
        self._problem: Exception | None = None
        self._stop = ScriptStop(throw_away=True)
        self._box = Sandbox()

    @property
    def verdicts(self) -> list[Verdict]:
        return [] if self._trial is None else self._trial.verdicts

    @property
    def deferred(self) -> list[tuple[Treatment, str]]:
        return [] if self._trial is None else self._trial.deferred

    @property
    def notes(self) -> list[str]:
        return files_of(self._box)

    @property
    def barred(self) -> bool:
        """Whether the script, which has run once, failed before it came to anything: it cannot be run twice here."""
        return bool(self.failure) and self._is_barred()

    def _is_barred(self) -> bool:
        active = self._trial is not None and self._trial.active
        return self._again and not (active or self.verdicts or self.deferred or self._stop.interrupted)

    def execute(self, target: str, arguments: Sequence[str]) -> None:
        """Run the script until every treatment is judged, or to its end; everything is as before then."""
        program = load_program(target, module=self._options.module)
        with ExitStack() as stack:
            stack.enter_context(kept_settings())
            stack.enter_context(self._box)
            stack.enter_context(as_main(program, arguments))
            stack.enter_context(ended_inside(lambda: self._stop.status is not None))
            errors = stack.enter_context(caught_errors(self._is_barred))
            stack.callback(self._live.remove)
            self._live.prepare()
            warnings.filterwarnings("ignore", _OUR_HOOKS, UserWarning)
            self._detect(stack)
            stack.callback(self._close)
            exit_code, _ = self._stop.run(partial(execute_program, program))
            if errors or exit_code:
                self._fail(errors[0] if errors else None, exit_code)
            errors.clear()
        if self._problem is not None:
            raise self._problem

    def _fail(self, error: BaseException | None, exit_code: int) -> None:
        """The script died: of a treatment where one was on, else of its own."""
        self.interrupted = self._stop.interrupted or isinstance(error, KeyboardInterrupt)
        blamed = self._trial is not None and bool(self._trial.active) and not self.interrupted
        if self._trial is not None and not self.interrupted:  # else `_close` takes all back
            self._trial.fail(error or RuntimeError(f"the script ended with exit code {exit_code}"))
        if not blamed:
            self.failure, self.exit_code = failure_text(error, exit_code), exit_code

    def _detect(self, stack: ExitStack) -> None:
        """Steps go to the trial: after the phases of a session, or from the start."""
        if self.diagnosis is not None:
            self._begin()
            steps = StepDetector(stamp_now, self._step)
            self._live.requested = steps.requested
            stack.callback(steps.remove)
            steps.install()
            return
        plan = Plan(warmup=self._options.warmup, active=self._options.active)
        session = Session(plan, hits=self._options.hits)
        if self._options.progress is not None:
            session.tell(self._options.progress)
        session.recorder.following = self._step
        session.recorder.finished = lambda: self._watched(session)
        stack.enter_context(session)
        session.recorder.batches.patch_loaders()

    def _watched(self, session: Session) -> None:
        """The phases are over: what was found says what to try first."""
        try:
            refuse_ranks()
            self.diagnosis = diagnose(session.assembled())
            self._live.requested = session.recorder.steps.requested
            self._begin()
        except Exception as error:  # raised by execute(), once the script is stopped
            self._problem = error
            self._stop()

    def _begin(self) -> None:
        assert self.diagnosis is not None
        chosen = self._treatments if self._options.names else _ordered(self._treatments, self.diagnosis)
        by_name = {each.name: each for each in TREATMENTS}
        earlier = [(by_name[v.treatment], v) for v in self._earlier if v.treatment in by_name]
        self._live.install()
        self._trial = TreatmentsTrial(
            chosen,
            self._live,
            limits=self._options.limits,
            earlier=earlier,
            left_out={} if self._options.names else _ONLY_BY_NAME,
            num_judged=len(self._earlier),
            ended=self._stop,
            elsewhere=kept_state,
        )

    def _step(self, stamp: Any) -> None:
        self._stop.check()
        if self._problem is not None:
            self._stop()
        if self._trial is not None:
            try:
                self._trial.step_ended(stamp)
            except Exception as error:  # ours, not the script's
                self._problem = error
                self._stop()
            if self._options.progress is not None:
                self._options.progress.show(self._trial.how_far)

    def _close(self) -> None:
        if self._trial is not None:
            self._trial.close()


def _ordered(treatments: Sequence[Treatment], diagnosis: Diagnosis) -> list[Treatment]:
    """Those that cure what was found first, by what would come back; then the others, those that compile last, but for
    those that change the loader: they take longer blocks."""
    codes = [finding.code for finding in diagnosis.findings]
    names = list(dict.fromkeys(name for code in codes for name in treatments_for(code)))
    last = len(names)

    def place(each: Treatment) -> tuple[int, bool, bool]:
        index = names.index(each.name) if each.name in names else last
        return index, each.name in OF_THE_LOADER, each.name.startswith("compile")

    return sorted(treatments, key=place)
