"""Treatments on trial in a running loop: parity of the losses first, then time, in blocks with and without.

Each treatment: the loop's state is put back to what it was, a few steps run with it, and their losses are held against
those of the loop as it is. Then blocks of steps, without, with, without, with, ... and without: each block with the
treatment is paired with its two neighbours, as in a counterfactual (estimate.py). Those accepted are tried together.

Batches: both sides fetch from the real loader and get the same few kept batches instead. Where a treatment changes the
loader it must be its own batches that come: then both sides begin the loader anew at the start of each block, from the
same random state, so that it gives the same batches in the same order to both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from perfdoctor.treat.treatment import Loop, Treatment
from perfdoctor.trial.dropout import dropouts, without_dropout
from perfdoctor.trial.estimate import FEWEST_PAIRS, claimed, estimate, paired
from perfdoctor.trial.live_loop import LiveLoop
from perfdoctor.trial.loop_state import LoopState
from perfdoctor.trial.schedule import counted_steps
from perfdoctor.trial.verdict import (
    SPENT,
    Parity,
    Side,
    Verdict,
    allowed_differences,
    failed,
    judge_parity,
    judged,
    refused,
    unequal,
    untried,
)
from perfdoctor.units import format_plural
from perfdoctor.watch.clocks import Stamp, cuda_active, elapsed_ns

OBSERVED_STEPS = 10
PARITY_STEPS = 8  # a multiple of the small numbers of batches that scripts take in turn
MOST_ROUNDS = 16
_EDGE = 3  # steps at the start of a block that are not counted: there the queues of the block before drain
_SETTLED = 1.5
_MOST_COUNTED = 200
_FOR_THE_BEST = 0.2  # of the time: kept back for the best together
_FOR_PROCESSES = 0.4  # of the time: kept back for treatments that are tried in processes of their own

Steps = Generator[int, Stamp, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreatmentLimits:
    """How long the trial may take: in all, and the blocks of one treatment, its share of what is left at most.

    At least six rounds are run."""

    seconds: float = 180.0
    each_seconds: float = 20.0
    rounds: int = MOST_ROUNDS


class TreatmentsTrial:
    """Give it the end of every step. `verdicts` fills as treatments are judged; `ended()` is called when all are.

    `earlier`: verdicts of a run before this one, whose accepted treatments belong to the best set as well.
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
        self._ended = ended
        self._elsewhere = elsewhere
        self._seconds = self._limits.seconds
        self._waiting = 0  # treatments that are still to be tried
        self._entered = False  # every treatment of the block was entered: what fails then is to take it back
        self._active: tuple[Treatment, ...] = ()  # those that the running steps are treated with
        self._loop = Loop(device=torch.device("cpu"))
        self._before: LoopState | None = None
        self._step_ns = 0.0
        self._began = time.perf_counter()
        self._workers = self._queue = 0  # of the loader, on the side that has more
        # Losses of the loop as it is, twice; by whether batches are replayed, and dropout is off.
        self._base: dict[tuple[bool, bool], tuple[list[float], list[float]]] = {}
        self._steps = self._all()
        self._left = next(self._steps)

    @property
    def active(self) -> str:
        """The treatment that is on at this moment, '' where none is: the one to blame where the script fails."""
        return _name(self._active)

    def step_ended(self, stamp: Stamp) -> None:
        """A step ended; `stamp` was taken at its end."""
        if self.over:
            return
        self._left -= 1
        if self._left > 0:
            return
        try:
            self._left = self._steps.send(stamp)
        except StopIteration:
            self.close()
            self._ended()

    def how_far(self) -> str:
        """For whoever waits: 'trying fused_optimizer, 3 of 12 treatments judged'."""
        doing = f"trying {self.active}" if self.active else "the loop as it is"
        return f"{doing}, {len(self.verdicts)} of {format_plural(len(self._treatments), 'treatment')} judged"

    def fail(self, error: BaseException) -> None:
        """The script died. A treatment that was on then has failed, and is told as a Verdict."""
        if self._active:
            self.verdicts.append(failed(_name(self._active), error))
        self.close()

    def close(self) -> None:
        """Take everything back; the state of the loop as it was before the first treatment. Safe to call twice."""
        if self.over:
            return
        self.over = True
        try:
            self._steps.close()  # leaves the treatment that is on
        finally:
            self._active = ()
            self._loop = Loop(device=torch.device("cpu"))  # the objects of the script may go
            before, self._before = self._before, None
            self._live.held = self._live.listening = False
            if before is not None:
                before.restore()

    def _all(self) -> Steps:
        """Everything in order; each `yield n` lets n steps run and gets the stamp at their end."""
        first = yield OBSERVED_STEPS // 2
        last = yield OBSERVED_STEPS // 2
        self._step_ns = elapsed_ns(first, last) / (OBSERVED_STEPS // 2)
        self._loop = self._live.loop()
        self._live.stop_looking()
        self._live.held = True
        self._before = LoopState.take(self._loop)
        refusals = [refusal_of(treatment, self._loop) for treatment in self._treatments]
        reasons = [self._elsewhere(treatment, self._loop) for treatment in self._treatments]
        if any(reason and not refusal for reason, refusal in zip(reasons, refusals, strict=True)):
            self._seconds *= 1 - _FOR_PROCESSES
        self._waiting = sum(not (refusal or reason) for refusal, reason in zip(refusals, reasons, strict=True))
        for treatment, refusal, reason in zip(self._treatments, refusals, reasons, strict=True):
            if refusal:
                self.verdicts.append(refused(treatment.name, refusal))
            elif reason:
                self.deferred.append((treatment, reason))
            elif not self._suffices(1 - _FOR_THE_BEST):
                self.verdicts.append(untried(treatment.name, SPENT))
            else:
                yield from self._try((treatment,))
                self._waiting -= 1
        self._waiting = 1
        yield from self._try_best()

    def _suffices(self, share: float = 1.0) -> bool:
        """Whether six rounds fit into what is left of a share of the time."""
        blocks = 2 * FEWEST_PAIRS + 1
        steps = 2 * PARITY_STEPS + blocks * (_EDGE + counted_steps(self._step_ns))
        left = share * self._seconds - (time.perf_counter() - self._began)
        return steps * self._step_ns / 1e9 < left

    def _try_best(self) -> Steps:
        found = [(t, v) for v in self.verdicts if v.accepted for t in self._treatments if t.name == v.treatment]
        accepted = sorted((*self._accepted, *found), key=lambda pair: -_saved(pair[1]))
        best = _compatible([treatment for treatment, _ in accepted], self._loop)
        if len(best) < 2:
            return
        if not self._suffices():
            self.verdicts.append(untried(_name(best), SPENT))
            return
        yield from self._try(best)

    def _try(self, treatments: tuple[Treatment, ...]) -> Steps:
        self._workers = self._queue = 0
        try:
            parity, replayed, stamps = yield from self._compare(treatments, dry=False)
            if parity.kept is False and dropouts(self._loop.model):
                without, _, _ = yield from self._compare(treatments, dry=True)
                if without.kept:
                    text = f"{without.text} (compared without dropout, whose masks are others)"
                    parity = replace(without, text=text)
            if parity.kept is False:
                self.verdicts.append(unequal(_name(treatments), parity))
                return
            yield from self._time(treatments, parity, _edge(stamps), replayed)
        except Exception as error:  # of applying or undoing a treatment; the script's own end in `fail`
            self._active = ()
            if self._entered and len(treatments) == 1:
                reason = f"it could not be taken back ({type(error).__name__}: {error})"
                self.deferred.append((treatments[0], reason))
            else:
                self.verdicts.append(failed(_name(treatments), error))

    def _compare(
        self, treatments: tuple[Treatment, ...], *, dry: bool
    ) -> Generator[int, Stamp, tuple[Parity, bool, list[Stamp]]]:
        """Losses with the treatments against those without, `dry`: with no dropout on either side."""
        losses: list[float] = []
        replayed, stamps = yield from self._parity_run(treatments, losses, replayed=None, dry=dry)
        if (replayed, dry) not in self._base:
            base: tuple[list[float], list[float]] = ([], [])
            for into in base:
                yield from self._parity_run((), into, replayed=replayed, dry=dry)
            self._base[replayed, dry] = base
        return self._judge(treatments, losses, *self._base[replayed, dry]), replayed, stamps

    def _judge(
        self, treatments: tuple[Treatment, ...], losses: list[float], base: list[float], again: list[float]
    ) -> Parity:
        rtol, atol, why = allowed_differences(treatments)
        return judge_parity(base, again, losses, rtol=rtol, atol=atol, why=why)

    def _parity_run(
        self, treatments: tuple[Treatment, ...], into: list[float], *, replayed: bool | None, dry: bool
    ) -> Generator[int, Stamp, tuple[bool, list[Stamp]]]:
        """A few steps from the same state on the same batches; their losses into `into`.

        Gives whether kept batches were replayed (None: as the treatment allows), and the stamps of the steps' ends.
        """
        assert self._before is not None
        self._live.restart(replayed=True)
        self._before.restore()
        stamps = []
        with ExitStack() as stack:
            if dry:
                stack.enter_context(without_dropout(self._loop.model))
            same = self._apply(treatments, stack)
            replayed = same if replayed is None else replayed
            self._live.restart(replayed=replayed)
            self._live.listening = True
            for _ in range(PARITY_STEPS):
                stamps.append((yield 1))
            self._live.listening = False
            into += self._live.values()
        return replayed, stamps

    def _apply(self, treatments: tuple[Treatment, ...], stack: ExitStack) -> bool:
        """Enter the treatments, in order. Gives whether they leave the loader as it is."""
        self._active, self._entered = treatments, False
        stack.callback(self._leave)
        loop, loader = self._loop, _look_of(self._loop.loader)
        for treatment in treatments:
            loop = stack.enter_context(treatment.applied(loop))
        self._entered = bool(treatments)
        for each in (self._loop.loader, loop.loader):
            self._workers = max(self._workers, getattr(each, "num_workers", 0))
            self._queue = max(self._queue, getattr(each, "num_workers", 0) * (getattr(each, "prefetch_factor", 0) or 0))
        stack.callback(self._live.restart, replayed=True)  # a treated iterator ends before its treatment does
        return bool(_look_of(loop.loader) == loader)

    def _leave(self) -> None:
        self._active = ()

    def _time(self, treatments: tuple[Treatment, ...], parity: Parity, edge: int, replayed: bool) -> Steps:
        counted = counted_steps(self._step_ns, multiple=self._period(replayed))
        # Workers that have just been started fill their queue first.
        plan = _Blocks(edge=edge if replayed else edge + self._queue, counted=counted, replayed=replayed)
        off: list[tuple[Stamp, Stamp]] = []
        on: list[tuple[Stamp, Stamp]] = []
        peaks: dict[bool, list[int]] = {True: [], False: []}
        began = time.perf_counter()
        share = self._share(began)
        yield from self._block((), off, peaks[False], plan)
        for number in range(1, self._limits.rounds + 1):
            yield from self._block(treatments, on, peaks[True], plan)
            yield from self._block((), off, peaks[False], plan)
            if self._is_late(began, number, share):
                break
        before, after = Side.of(off, peaks[False], plan.counted), Side.of(on, peaks[True], plan.counted)
        saving = estimate(paired(before.times_ns[:-1], after.times_ns, before.times_ns[1:]))
        saving = claimed(saving, float(np.median(before.times_ns)))
        lines = tuple(dict.fromkeys(line for treatment in treatments for line in treatment.lines))
        self.verdicts.append(judged(_name(treatments), parity, before, after, saving, lines))

    def _share(self, now: float) -> float:
        left = (1 - _FOR_THE_BEST) * self._seconds - (now - self._began)
        return min(self._limits.each_seconds, max(left, 0.0) / max(self._waiting, 1))

    def _is_late(self, began: float, rounds: int, share: float) -> bool:
        """Six rounds decide; more where there is time left of the treatment's share, in seconds."""
        now = time.perf_counter()
        if now - self._began > self._seconds:
            return True
        return rounds >= FEWEST_PAIRS and now - began > share

    def _block(
        self, treatments: tuple[Treatment, ...], into: list[tuple[Stamp, Stamp]], peaks: list[int], plan: _Blocks
    ) -> Steps:
        assert self._before is not None
        measured = self._loop.device.type == "cuda" and cuda_active()
        with ExitStack() as stack:
            self._apply(treatments, stack)
            self._live.restart(replayed=plan.replayed)
            if not plan.replayed:
                self._before.restore_random()
            first = yield plan.edge
            if measured:
                torch.cuda.reset_peak_memory_stats(self._loop.device)
            last = yield plan.counted
            if measured:
                peaks.append(torch.cuda.max_memory_allocated(self._loop.device) - self._before.own_bytes)
            into.append((first, last))

    def _period(self, replayed: bool) -> int:
        """Steps after which the loader's costs come again: its workers' turns, and a short epoch with its end."""
        if replayed:
            return 1
        return loader_period(self._loop.loader, _MOST_COUNTED, workers=self._workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """The blocks of both sides: uncounted and counted steps, and whose batches come."""

    edge: int
    counted: int
    replayed: bool


def loader_period(loader: Any, most: int, *, workers: int = 0) -> int:
    """Steps after which a loader's costs come again: its workers' turns, and an epoch where that is `most` or fewer."""
    turns = max(workers, getattr(loader, "num_workers", 0), 1)
    both = math.lcm(turns, _epoch_of(loader))
    return both if both <= most else turns


def _epoch_of(loader: Any) -> int:
    """Batches of an epoch, 1 where it has no length."""
    try:
        return max(len(loader), 1)
    except TypeError:  # a stream
        return 1


def refusal_of(treatment: Treatment, loop: Loop) -> str | None:
    """`treatment.refuses(loop)`; one that fails at the look of a loop that nobody thought of keeps no other back."""
    try:
        return treatment.refuses(loop)
    except Exception as error:
        return f"it cannot tell whether it fits ({type(error).__name__}: {error})"


def _look_of(loader: Any) -> Any:
    """What tells whether a treatment has changed the loader."""
    if loader is None:
        return None
    settings = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
    return (id(loader), type(loader), *(getattr(loader, name, None) for name in settings))


def _edge(stamps: Sequence[Stamp]) -> int:
    """Steps until the treated loop runs evenly: a treatment may compile or warm up in the first."""
    times = np.diff([stamp.ns for stamp in stamps])
    usual = float(np.median(times[-3:]))
    late = [i for i, ns in enumerate(times) if ns > _SETTLED * usual]
    return max(_EDGE, min(late[-1] + 2, PARITY_STEPS) if late else _EDGE)


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


def _name(treatments: Sequence[Treatment]) -> str:
    return " + ".join(treatment.name for treatment in treatments)


def _saved(verdict: Verdict) -> float:
    return 0.0 if verdict.saving is None else verdict.saving.mid_ns
