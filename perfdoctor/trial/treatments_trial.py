"""Treatments on trial in a running loop: parity of the losses first, then time, in blocks with and without.

Each treatment: the loop's state is put back to what it was, a few steps run with it, and their losses are held against
those of the loop as it is. Then blocks of steps, without, with, without, with, ... and without: each block with the
treatment is paired with its two neighbours, as in a counterfactual (estimate.py). Those accepted are tried together.

Batches: both sides fetch from the real loader and get the same few kept batches instead. Where a treatment changes the
loader it must be its own batches that come: then both sides begin the loader anew at the start of each block, from the
same random state, so that it gives the same batches in the same order to both.

Those take whole epochs a block: on an H200 two of them had used up the 140 s of a loop of 41 ms a step before any of
the others was tried. So the door orders them behind those that cure as much, and what they need at least is kept back.

The time is kept: what does not fit into it is not begun, and what runs when it is over is cut, a compilation included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from perfdoctor.treat.treatment import Loop, Treatment
from perfdoctor.trial.deadline import Deadline
from perfdoctor.trial.dropout import dropouts
from perfdoctor.trial.live_loop import LiveLoop
from perfdoctor.trial.loop_state import LoopState
from perfdoctor.trial.parity import (
    MOST_BASES,
    NOT_COMPARED,
    Allowed,
    Parity,
    is_doubtful,
    is_open,
    judge_parity,
    pooled,
)
from perfdoctor.trial.schedule import counted_steps
from perfdoctor.trial.treated_steps import Steps, TreatedBlock, TreatedSteps, settled_after
from perfdoctor.trial.treated_timing import TreatedTiming
from perfdoctor.trial.treatment_time import Patience, TreatmentLimits, TreatmentTime, is_promising, loader_period
from perfdoctor.trial.verdict import SPENT, Verdict, cut_off, failed, joined_name, refused, too_long, unequal, untried
from perfdoctor.units import format_plural
from perfdoctor.watch.clocks import Stamp, elapsed_ns

OBSERVED_STEPS = 10
_GRACE_S = 2.0  # for a treatment that is over to come to the end of a step: else the script ends, and is run again
_FOR_PROCESSES = 0.4  # of the time: kept back for treatments that are tried in processes of their own


class _Spent(BaseException):
    """The time is over: thrown into what waits for the end of a step."""


class TreatmentsTrial:
    """Give it the end of every step. `verdicts` fills as treatments are judged; `ended()` is called when all are.

    `earlier`: verdicts of a run before this one, whose accepted treatments belong to the best set as well.
    `left_out`: why a treatment is not tried though it fits. `num_judged`: how many were in the runs before.
    `elsewhere` says why a treatment cannot be switched in a running process, None where it can; those that cannot,
    and those that could not be taken back, are in `deferred`, with the reason, and get no verdict here.
    """

    def __init__(
        self,
        treatments: Sequence[Treatment],
        live: LiveLoop,
        *,
        limits: TreatmentLimits | None = None,
        earlier: Sequence[tuple[Treatment, Verdict]] = (),
        left_out: Mapping[str, str] | None = None,
        num_judged: int = 0,
        ended: Callable[[], None] = lambda: None,
        elsewhere: Callable[[Treatment, Loop], str | None] = lambda treatment, loop: None,
    ) -> None:
        self.verdicts: list[Verdict] = []
        self.deferred: list[tuple[Treatment, str]] = []
        self.over = False
        self._treatments = tuple(treatments)
        self._live = live
        self._limits = limits or TreatmentLimits()
        self._accepted = [(treatment, verdict) for treatment, verdict in earlier if verdict.accepted]
        self._left_out = left_out or {}
        self._num_judged = num_judged
        self._ended = ended
        self._elsewhere = elsewhere
        self._waiting: list[Treatment] = []  # still to be tried, the one that is tried now included
        self._promising: list[TreatedTiming] = []
        self._treated: TreatedSteps | None = None  # once the loop is known
        self._doing = ""  # with the treatment that is tried, for a verdict that it is cut off in
        self._parity = NOT_COMPARED  # of the treatment that is tried
        self._time = TreatmentTime(began=time.perf_counter(), seconds=self._limits.seconds)
        self._deadline = Deadline(self._end_of_time)
        self._last_moment = math.inf  # of the treatment that is tried
        self._over_time = self._sending = False
        # Losses of the loop as it is, twice or more; by whether batches are replayed, and dropout is off.
        self._base: dict[tuple[bool, bool], list[list[float]]] = {}
        self._steps = self._all()
        self._left = next(self._steps)
        self._deadline.set(self._time.over)  # whether or not a step comes to its end

    @property
    def active(self) -> str:
        """The treatment that is on at this moment, '' where none is: the one to blame where the script fails."""
        return "" if self._treated is None else joined_name(self._treated.active)

    def step_ended(self, stamp: Stamp) -> None:
        """A step ended; `stamp` was taken at its end. Ends a script that has caught what ends it, too."""
        self._sending = True
        try:
            self._go_on(stamp)
        finally:
            self._sending = False
        if self.over:
            self._ended()

    def _go_on(self, stamp: Stamp) -> None:
        cut = self._last_moment <= self._time.now() < self._time.over  # the other treatments need what is left
        self._over_time |= self._deadline.past and not cut
        self._left -= 1
        if self._over_time:
            self.close()
        if self.over:
            return
        try:
            if cut:
                self._left = self._steps.throw(_Spent())
            elif self._left <= 0:
                self._left = self._steps.send(stamp)
        except StopIteration:
            self.close()

    def _end_of_time(self) -> None:
        """The time of all, or of the treatment that is tried, is over, wherever the loop is: in a step that compiles,
        say. There nothing can be taken back, and the script ends.
        """
        if not (self.over or self._sending):  # else at the end of what goes on in here
            self._over_time = True
            self._ended()

    def how_far(self) -> str:
        """For whoever waits: 'trying fused_optimizer, 3 of 12 treatments judged'."""
        doing = f"trying {self.active}" if self.active else "the loop as it is"
        judged = sum(not verdict.is_set for verdict in self.verdicts) + self._num_judged
        number = len(self._treatments) + self._num_judged
        return f"{doing}, {judged} of {format_plural(number, 'treatment')} judged"

    def fail(self, error: BaseException) -> None:
        """The script died. A treatment that was on then has failed, and is told as a Verdict."""
        if self.active and not self._over_time:
            self._decide(failed(self.active, error))
        self.close()

    def close(self) -> None:
        """Take everything back; the state of the loop as it was before the first treatment. Safe to call twice."""
        if self.over:
            return
        self.over = True
        self._deadline.clear()
        try:
            if self._over_time:
                self._cut()
            self._steps.close()  # leaves the treatment that is on
        finally:
            self._deadline.clear()  # the next treatment has set it, where one was cut off
            treated, self._treated = self._treated, None  # the objects of the script may go
            self._live.held = self._live.listening = False
            if treated is not None:
                treated.before.restore()

    def _cut(self) -> None:
        with suppress(StopIteration, _Spent):
            self._steps.throw(_Spent())
        if self._time.remaining() > 0:
            return  # the others are tried in another run of the script
        known = {verdict.treatment for verdict in self.verdicts} | {each.name for each, _ in self.deferred}
        self.verdicts += [untried(each.name, SPENT) for each in self._treatments if each.name not in known]

    def _all(self) -> Steps:
        """Everything in order; each `yield n` lets n steps run and gets the stamp at their end."""
        first = yield OBSERVED_STEPS // 2
        last = yield OBSERVED_STEPS // 2
        loop = self._live.loop()
        self._time.step_ns = elapsed_ns(first, last) / (OBSERVED_STEPS // 2)
        self._time.use = self._live.loader_use()
        self._live.stop_looking()
        self._live.held = True
        self._treated = TreatedSteps(self._live, loop, LoopState.take(loop, self._live.leaves()))
        self._sort_out(loop)
        if self.deferred:
            self._time.seconds *= 1 - _FOR_PROCESSES
        self._deadline.set(self._time.over)
        while self._waiting:
            treatment, left = self._waiting[0], self._time.remaining_for_each()
            if left < self._time.least():
                self.verdicts.append(self._time.too_long(treatment.name, left))
            else:
                self._last_moment = self._time.last_moment(self._waiting)
                self._deadline.set(min(self._last_moment + _GRACE_S, self._time.over))
                yield from self._try(self._treated, (treatment,))
            del self._waiting[0]
        self._last_moment = math.inf
        self._deadline.set(self._time.over)
        yield from self._go_on_with_promising(self._treated)
        yield from self._try_best(self._treated)

    def _sort_out(self, loop: Loop) -> None:
        """What is to be tried here; of the others, why not."""
        for treatment in self._treatments:
            name = treatment.name
            if refusal := refusal_of(treatment, loop):
                self.verdicts.append(refused(name, refusal))
            elif name in self._left_out:
                self.verdicts.append(untried(name, self._left_out[name]))
            elif reason := self._elsewhere(treatment, loop):
                self.deferred.append((treatment, reason))
            else:
                self._waiting.append(treatment)

    def _try_best(self, treated: TreatedSteps) -> Steps:
        found = [(t, v) for v in self.verdicts if v.accepted for t in self._treatments if t.name == v.treatment]
        accepted = sorted((*self._accepted, *found), key=lambda pair: -pair[1].saved_ns)
        if len(accepted) < 2:
            return
        if self._time.remaining() < self._time.least():
            self.verdicts.append(untried(joined_name([treatment for treatment, _ in accepted]), SPENT))
            return
        best = _compatible([treatment for treatment, _ in accepted], treated.loop)
        if len(best) >= 2:
            yield from self._try(treated, best)

    def _try(self, treated: TreatedSteps, treatments: tuple[Treatment, ...]) -> Steps:
        treated.begin()
        name, began = joined_name(treatments), time.perf_counter()
        self._doing, self._parity = "its losses were compared", NOT_COMPARED
        try:
            parity, replayed, stamps = yield from self._compare(treated, treatments, dry=False)
            if parity.kept is False and dropouts(treated.loop.model):
                without, _, _ = yield from self._compare(treated, treatments, dry=True)
                if without.kept:
                    text = f"{without.text} (compared without dropout, whose masks are others)"
                    parity = replace(without, text=text)
            self._parity = parity
            if parity.kept is False:
                self.verdicts.append(unequal(name, parity))
                return
            yield from self._measure(treated, treatments, settled_after(stamps), replayed)
        except _Spent:
            seconds = time.perf_counter() - began
            self.verdicts.append(cut_off(name, self._doing, seconds, self._parity))
        except Exception as error:  # of applying or undoing a treatment; the script's own end in `fail`
            self._blame(treated, treatments, error)

    def _blame(self, treated: TreatedSteps, treatments: tuple[Treatment, ...], error: Exception) -> None:
        treated.active = ()
        if treated.entered and len(treatments) == 1:
            reason = f"it could not be taken back ({type(error).__name__}: {error})"
            self.verdicts = [verdict for verdict in self.verdicts if verdict.treatment != treatments[0].name]
            self.deferred.append((treatments[0], reason))
        else:
            self._decide(failed(joined_name(treatments), error))

    def _decide(self, verdict: Verdict) -> None:
        """In place of the one that its treatment has, where it has one."""
        names = [each.treatment for each in self.verdicts]
        if verdict.treatment in names:
            self.verdicts[names.index(verdict.treatment)] = verdict
        else:
            self.verdicts.append(verdict)

    def _compare(
        self, treated: TreatedSteps, treatments: tuple[Treatment, ...], *, dry: bool
    ) -> Generator[int, Stamp, tuple[Parity, bool, list[Stamp]]]:
        """Losses with the treatments against those without, `dry`: with no dropout on either side."""
        losses: list[float] = []
        replayed, stamps = yield from treated.compared(treatments, losses, replayed=None, dry=dry)
        bases = self._base.setdefault((replayed, dry), [])
        while len(bases) < 2:
            yield from self._run_as_it_is(treated, bases, replayed=replayed, dry=dry)
        allowed = Allowed.of(treatments)
        parity = judge_parity(bases, losses, allowed)
        while is_doubtful(parity, bases[0]) and len(bases) < MOST_BASES:
            yield from self._run_as_it_is(treated, bases, replayed=replayed, dry=dry)
            parity = judge_parity(bases, losses, allowed)
        runs = [parity]
        while is_open(runs, bases[0]):
            losses = []
            yield from treated.compared(treatments, losses, replayed=replayed, dry=dry)
            runs.append(judge_parity(bases, losses, allowed))
            self._parity = pooled(runs, bases[0])  # where the time ends meanwhile
        return pooled(runs, bases[0]), replayed, stamps

    def _run_as_it_is(self, treated: TreatedSteps, bases: list[list[float]], *, replayed: bool, dry: bool) -> Steps:
        losses: list[float] = []
        yield from treated.compared((), losses, replayed=replayed, dry=dry)
        bases.append(losses)

    def _measure(self, treated: TreatedSteps, treatments: tuple[Treatment, ...], edge: int, replayed: bool) -> Steps:
        # Workers that have just been started fill their queue first.
        edge = edge if replayed else edge + treated.queue
        period = 1 if replayed else loader_period(self._live.loader_use(), self._time.step_ns, workers=treated.workers)
        block = TreatedBlock(edge=edge, counted=counted_steps(self._time.step_ns, multiple=period), replayed=replayed)
        needed, left = self._time.seconds_of(block), self._time.remaining()
        if needed > left:
            self.verdicts.append(too_long(joined_name(treatments), needed, left, block.steps, self._parity))
            return
        timing = TreatedTiming(treatments, self._parity, block)
        try:
            yield from timing.run(treated, Patience(self._time, self._waiting, self._limits).ends)
        except _Spent:
            if not timing.is_enough:
                self._doing = timing.doing
                raise
        self._decide(timing.verdict())
        if is_promising(timing.saving(), self._time.step_ns):
            self._promising.append(timing)

    def _go_on_with_promising(self, treated: TreatedSteps) -> Steps:
        """What seems to save much, but not beyond doubt, is timed again, as long as before once more or twice."""
        waiting = sorted(self._promising, key=lambda timing: -timing.saving().mid_ns)
        for number, timing in enumerate(waiting):
            left = [treatment for each in waiting[number:] for treatment in each.treatments]
            if self._time.spare(left) < 0:
                return
            treated.begin()
            try:
                yield from timing.run(treated, Patience(self._time, left, self._limits, shares=2).ends)
            except _Spent:
                self._decide(timing.verdict())
                raise
            except Exception as error:
                self._blame(treated, timing.treatments, error)
            else:
                self._decide(timing.verdict())


def refusal_of(treatment: Treatment, loop: Loop) -> str | None:
    """`treatment.refuses(loop)`; one that fails at the look of a loop that nobody thought of keeps no other back."""
    try:
        return treatment.refuses(loop)
    except Exception as error:
        return f"it cannot tell whether it fits ({type(error).__name__}: {error})"


def _compatible(best: Sequence[Treatment], loop: Loop) -> tuple[Treatment, ...]:
    """The best first; one that refuses beside those before it, or changes what one of them changed, is left out."""
    taken: list[Treatment] = []
    with ExitStack() as stack:
        for treatment in best:
            if treatment.name.startswith("compile") and any(each.name.startswith("compile") for each in taken):
                continue
            if refusal_of(treatment, loop):
                continue
            try:
                loop = stack.enter_context(treatment.applied(loop))
            except Exception:
                continue
            taken.append(treatment)
    return tuple(taken)
