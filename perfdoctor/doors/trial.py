"""`session.trial()`: the trial of a loop in hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from perfdoctor.diagnose import diagnose
from perfdoctor.doors.rank_gathering import rank_of_run
from perfdoctor.doors.session import Session
from perfdoctor.errors import SessionError, TrialRefused
from perfdoctor.report.lines import cut
from perfdoctor.report.trial import TrialReport
from perfdoctor.trial.broken_arm import BrokenArm
from perfdoctor.trial.kept_loop import KeptLoop
from perfdoctor.trial.live_model import buffers_of
from perfdoctor.trial.loader_replay import LoaderReplay
from perfdoctor.trial.outcome import TrialOutcome
from perfdoctor.trial.runner import Limits, Trial
from perfdoctor.trial.sandbox import Sandbox
from perfdoctor.trial.suspects import MOST_SUSPECTS, Surroundings, Suspect, choose_suspects
from perfdoctor.units import format_plural

_LONGEST_ERROR = 200


class LiveTrial:
    """A trial of the loop that a session watches. It begins by itself after the session's last phase.

    `over` once everything is measured and put back; `report()` after the loop. With `restored`, what the trial's steps
    changed is put back when it ends: parameters, the buffers of their models, optimizer state, learning-rate schedules,
    GradScalers, random states. What else the loop keeps (an EMA, a list of losses) is its own affair.
    """

    def __init__(
        self,
        session: Session,
        limits: Limits,
        *,
        suspects: int = MOST_SUSPECTS,
        ended: Callable[[], None] = lambda: None,
        restored: bool = True,
        models: Any = None,
        broken: Sequence[BrokenArm] = (),
    ) -> None:
        """`broken`: what the script died of in earlier runs, which is not tried again."""
        self.replay = LoaderReplay(session.recorder.steps.requested)
        self.problem: BaseException | None = None
        self._session = session
        self._limits = limits
        self._suspects = suspects
        self._ended = ended
        self._restored = restored
        self._models = models
        self._known_to_break = broken
        self._before: KeptLoop | None = None
        self._trial: Trial | None = None
        self._over = False
        try:
            refuse_ranks()
        except TrialRefused as error:  # told by report()
            self.problem, self._over = error, True
            return
        session.recorder.following = self._step
        session.recorder.finished = self._begin

    @property
    def running(self) -> bool:
        """Whether the session is over and the trial is not."""
        return self._trial is not None and not self._over

    @property
    def over(self) -> bool:
        """Whether the loop may end."""
        return self._over

    @property
    def begun(self) -> bool:
        """Whether there was a trial, or a reason why there is none."""
        return self._trial is not None or self.problem is not None

    @property
    def measured(self) -> bool:
        """Whether there is an outcome."""
        return self._trial is not None and self.problem is None

    @property
    def broken(self) -> BrokenArm | None:
        """What was on when the script died; None where it did not, or nothing was on."""
        return None if self._trial is None else self._trial.broken

    @property
    def spent_s(self) -> float:
        """How long the trial has run by now, without the watched phases."""
        return 0.0 if self._trial is None else self._trial.spent_s

    def fail(self, failure: str) -> None:
        """The loop ends here, of `failure`. Before `close`, which takes back what was on."""
        if self._trial is not None and not self._over:
            self._trial.fail(failure)

    def note(self, error: BaseException) -> None:
        """The loop ends here, by `error`: where something was on trial, that is added to what the error says."""
        if isinstance(error, Exception):
            self.fail(failure_text(error, 1))
        if self.broken is not None:
            error.add_note(f"perfdoctor: the trial had {self.broken.name} on here: not what the loop does by itself")

    def report(self) -> TrialReport:
        """What was measured: `print` it, or look at its fields.

        Raises:
            SessionError: the loop ended before the trial began.
            TrialRefused: the trial would have been wrong here.
        """
        return TrialReport.of(self.outcome())

    def outcome(self) -> TrialOutcome:
        """The figures behind `report()`; raises as it does."""
        if self.problem is not None:
            raise self.problem
        if self._trial is None:
            raise SessionError(f"the loop ended before the trial began: {too_short(self._session)}")
        outcome = self._trial.outcome()
        return replace(outcome, notes=(*outcome.notes, *stream_notes(self.replay)))

    def close(self) -> None:
        """Take everything back, at whatever point."""
        self._finish(midway=True)

    def _finish(self, *, midway: bool) -> None:
        if self._over:
            return
        self._over = True
        try:
            if self._trial is not None:
                self._trial.finish()
        finally:  # of a trial that was broken off before it began, too
            self._put_back(midway=midway)

    def next_of(self, iterator: Iterator[Any]) -> Any:
        """`next(iterator)` for batches that the session hands out. Raises StopIteration once the trial is over."""
        if self._over:
            raise StopIteration
        return self.replay.next_of(iterator)

    def _begin(self) -> None:
        try:
            refuse_ranks()
            optimizers = [each for ref in self._session.recorder.steps.optimizers.values() if (each := ref())]
            diagnosis = diagnose(self._session.assembled())
            surroundings = Surroundings(optimizers=tuple(optimizers), replay=self.replay)
            suspects = [self._unbroken(each) for each in choose_suspects(diagnosis, surroundings)]
            self._keep(optimizers)
            trial = Trial(
                diagnosis,
                suspects,
                self.replay,
                limits=self._limits,
                most=self._suspects,
                ended=self._end,
                broken=self._known_to_break,
            )
            trial.start()
            self._trial = trial
        except Exception as error:  # told by report(): the user's loop goes on, or is stopped on purpose
            self.problem = error
            self._over = True
            self._put_back(midway=False)
            self._ended()

    def _unbroken(self, suspect: Suspect) -> Suspect:
        """The suspect, refused where the script is known to die without it."""
        why = next((each.why for each in self._known_to_break if each.forbids(suspect.finding)), "")
        return Suspect(finding=suspect.finding, refusal=why) if why else suspect

    def _step(self, stamp: Any) -> None:
        if self._trial is not None:
            try:
                self._trial.step_ended(stamp)
            except Exception as error:  # ours, not the loop's: told by report()
                self._abandon(error)
                return
            if self._session.progress is not None:
                self._session.progress.show(self._trial.how_far)

    def _abandon(self, error: Exception) -> None:
        self.problem = error
        self._session.recorder.following = None
        self._session.recorder.steps.idle = True
        self._finish(midway=False)
        self._ended()

    def _end(self) -> None:
        self._over = True
        self._session.recorder.following = None
        self._session.recorder.steps.idle = True
        self._put_back(midway=False)
        self._ended()

    def _keep(self, optimizers: list[Any]) -> None:
        if self._restored:
            parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
            models = self._models if self._models is not None else [*parameters, *buffers_of(optimizers)]
            device = next((p.device for p in parameters), torch.device("cpu"))
            self._before = KeptLoop.of(models, optimizers, device, self.replay)

    def _put_back(self, *, midway: bool) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.put_back(midway=midway)


def refuse_ranks() -> None:
    """Raises TrialRefused where this process is one of several ranks, by torchrun's variables or its process group."""
    _, num_ranks = rank_of_run()
    if num_ranks > 1:
        raise TrialRefused(
            f"this loop runs on {num_ranks} ranks, which could not agree on what to switch when; one that stops would "
            "leave the others waiting. Try it on one rank: start `perfdoctor trial` without torchrun (RANK and "
            "WORLD_SIZE unset). `perfdoctor run` under torchrun watches all of them"
        )


def failure_text(error: BaseException | None, exit_code: int) -> str:
    """What a script died of, in one line: 'IndexError: index 7 is out of bounds', or its exit code."""
    if error is None:
        return f"exit code {exit_code}"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return cut(f"{type(error).__name__}: {first}".removesuffix(": "), _LONGEST_ERROR)


def too_short(session: Session) -> str:
    """How many steps a loop made that ended while it was watched, and how many it should make."""
    recorder = session.recorder
    made, watched = sum(row.complete for row in recorder.rows), recorder.plan.total(recorder.stages)
    return (
        f"it made {format_plural(made, 'step')}, where {watched} or more are watched (--warmup, --active) and a few "
        "hundred to two thousand tried; let it run longer"
    )


def stream_notes(replay: LoaderReplay) -> list[str]:
    """What is not put back: batches taken from something that cannot be asked for them again."""
    if not replay.streaming:
        return []
    return [
        f"the loop reads a stream (an IterableDataset or a generator), and the trial took {replay.num_taken} batches "
        "of it, besides those that were watched: what lies behind it outside this process has advanced by as many"
    ]


def files_of(box: Sandbox) -> list[str]:
    notes = []
    if box.files:
        shown = ", ".join(box.files[:10]) + (f" and {len(box.files) - 10} more" if len(box.files) > 10 else "")
        notes.append(f"written to a scratch folder and deleted: {shown}")
    if box.kept:
        notes.append(f"the script replaced or deleted {', '.join(box.kept[:10])}: the real ones are untouched")
    return [*notes, *box.escaped]
