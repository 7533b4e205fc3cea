"""Treatments on trial in a running loop: parity of the losses first, then time, in blocks with and without.

Each treatment: the loop's state is put back to what it was, a few steps run with it, and their losses are held against
those of the loop as it is. Then blocks of steps, without, with, without, with, ... and without: each block with the
treatment is paired with its two neighbours, as in a counterfactual (estimate.py). Those accepted are tried together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from perfdoctor.diagnose.finding import StepTime
from perfdoctor.treat.snapshot import Snapshot
from perfdoctor.treat.treatment import Loop, Treatment
from perfdoctor.trial.estimate import FEWEST_PAIRS, Estimate, estimate, paired
from perfdoctor.trial.live_loop import LiveLoop
from perfdoctor.trial.schedule import EDGE, counted_steps
from perfdoctor.trial.verdict import Parity, SpeedUp, Verdict, judge_parity
from perfdoctor.watch.clocks import Stamp, cuda_active, elapsed_ns

OBSERVED_STEPS = 10
PARITY_STEPS = 8  # a multiple of the small numbers of batches that scripts take in turn
MOST_ROUNDS = 8
_SETTLED = 1.5
_NOT_RUN = Parity(kept=None, text="not compared")

Steps = Generator[int, Stamp, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreatmentLimits:
    """How long each treatment's blocks may take."""

    seconds: float = 30.0
    rounds: int = MOST_ROUNDS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """Blocks of one side: ns a step of each, and the most memory in use in any."""

    times_ns: tuple[float, ...]
    peak_bytes: int | None

    def step_time(self, counted: int) -> StepTime:
        low, mid, high = np.percentile(self.times_ns, (25, 50, 75))
        return StepTime(
            median_ns=round(float(mid)), low_ns=round(float(low)), high_ns=round(float(high)),
            num_steps=counted * len(self.times_ns), basis=f"{len(self.times_ns)} blocks of {counted} steps",
        )  # fmt: skip


class TreatmentsTrial:
    """Give it the end of every step. `verdicts` fills as treatments are judged; `ended()` is called when all are."""

    def __init__(
        self,
        treatments: Sequence[Treatment],
        live: LiveLoop,
        *,
        limits: TreatmentLimits | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.verdicts: list[Verdict] = []
        self.over = False
        self._treatments = tuple(treatments)
        self._live = live
        self._limits = limits or TreatmentLimits()
        self._ended = ended
        self._active: tuple[Treatment, ...] = ()  # those that the running steps are treated with
        self._loop = Loop(device=torch.device("cpu"))
        self._before: Snapshot | None = None
        self._step_ns = 0.0
        self._base: list[float] = []
        self._again: list[float] = []
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

    def fail(self, error: BaseException) -> None:
        """The script died. A treatment that was on then has failed, and is told as a Verdict."""
        if self._active:
            self.verdicts.append(_failed(self._active, error))
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
            before, self._before = self._before, None
            if before is not None:
                before.restore()
            self._live.held = self._live.listening = False

    def _all(self) -> Steps:
        """Everything in order; each `yield n` lets n steps run and gets the stamp at their end."""
        first = yield OBSERVED_STEPS // 2
        last = yield OBSERVED_STEPS // 2
        self._step_ns = elapsed_ns(first, last) / (OBSERVED_STEPS // 2)
        self._loop = self._live.loop()
        self._live.stop_looking()
        self._live.held = True
        self._before = Snapshot.take(self._loop.model, self._loop.optimizers)
        yield from self._parity_run((), self._base)
        yield from self._parity_run((), self._again)
        for treatment in self._treatments:
            refusal = treatment.refuses(self._loop)
            if refusal:
                self.verdicts.append(_refused(treatment, refusal))
            else:
                yield from self._try((treatment,))
        accepted = sorted((v for v in self.verdicts if v.accepted), key=lambda v: -_saved(v))
        best = [t for v in accepted for t in self._treatments if t.name == v.treatment]
        if len(best) > 1:
            yield from self._try(_compatible(best, self._loop))

    def _try(self, treatments: tuple[Treatment, ...]) -> Steps:
        try:
            losses: list[float] = []
            stamps = yield from self._parity_run(treatments, losses)
            parity = self._judge(treatments, losses)
            if parity.kept is False:
                self.verdicts.append(_unequal(treatments, parity))
                return
            yield from self._time(treatments, parity, _edge(stamps))
        except Exception as error:  # of applying or undoing a treatment; the script's own end in `fail`
            self._active = ()
            self.verdicts.append(_failed(treatments, error))

    def _judge(self, treatments: tuple[Treatment, ...], losses: list[float]) -> Parity:
        numerics = [treatment.numerics for treatment in treatments]
        return judge_parity(
            self._base,
            self._again,
            losses,
            rtol=sum(each.rtol for each in numerics),
            atol=sum(each.atol for each in numerics),
            why="; ".join(each.why for each in numerics if each.why and not each.bitwise),
        )

    def _parity_run(self, treatments: tuple[Treatment, ...], into: list[float]) -> Generator[int, Stamp, list[Stamp]]:
        """A few steps from the same state on the same batches; their losses into `into`, the stamps of their ends."""
        assert self._before is not None
        self._before.restore()
        stamps = []
        with ExitStack() as stack:
            self._apply(treatments, stack)
            self._live.listening = True
            for _ in range(PARITY_STEPS):
                stamps.append((yield 1))
            self._live.listening = False
            into += self._live.values()
        self._restarted(treatments)
        return stamps

    def _apply(self, treatments: tuple[Treatment, ...], stack: ExitStack) -> None:
        """Enter the treatments, in order; their loader, where they changed it, is begun anew."""
        self._active = treatments
        stack.callback(self._leave)
        loop, loader = self._loop, _look_of(self._loop.loader)
        for treatment in treatments:
            loop = stack.enter_context(treatment.applied(loop))
        self._live.restart(replayed=_look_of(loop.loader) == loader)

    def _leave(self) -> None:
        self._active = ()

    def _restarted(self, treatments: tuple[Treatment, ...]) -> None:
        if treatments:
            self._live.restart(replayed=True)

    def _time(self, treatments: tuple[Treatment, ...], parity: Parity, edge: int) -> Steps:
        counted = counted_steps(self._step_ns)
        off: list[tuple[Stamp, Stamp]] = []
        on: list[tuple[Stamp, Stamp]] = []
        peaks: dict[bool, list[int]] = {True: [], False: []}
        began = time.perf_counter()
        yield from self._block((), off, peaks[False], EDGE, counted)
        for _ in range(self._limits.rounds):
            yield from self._block(treatments, on, peaks[True], edge, counted)
            yield from self._block((), off, peaks[False], EDGE, counted)
            if time.perf_counter() - began > self._limits.seconds:
                break
        before = _Side(times_ns=_times(off, counted), peak_bytes=max(peaks[False], default=None))
        after = _Side(times_ns=_times(on, counted), peak_bytes=max(peaks[True], default=None))
        saving = estimate(paired(before.times_ns[:-1], after.times_ns, before.times_ns[1:]))
        self.verdicts.append(_judged(treatments, parity, before, after, saving, counted))

    def _block(
        self, treatments: tuple[Treatment, ...], into: list[tuple[Stamp, Stamp]], peaks: list[int], edge: int,
        counted: int,
    ) -> Steps:  # fmt: skip
        with ExitStack() as stack:
            self._apply(treatments, stack)
            first = yield edge
            if self._loop.device.type == "cuda" and cuda_active():
                torch.cuda.reset_peak_memory_stats(self._loop.device)
            last = yield counted
            if self._loop.device.type == "cuda" and cuda_active():
                peaks.append(torch.cuda.max_memory_allocated(self._loop.device))
            into.append((first, last))
        self._restarted(treatments)


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
    return max(EDGE, min(late[-1] + 2, PARITY_STEPS) if late else EDGE)


def _times(spans: Sequence[tuple[Stamp, Stamp]], counted: int) -> tuple[float, ...]:
    return tuple(elapsed_ns(first, last) / counted for first, last in spans)


def _compatible(best: Sequence[Treatment], loop: Loop) -> tuple[Treatment, ...]:
    """The best first; one that refuses beside those before it, or changes what one of them changed, is left out."""
    taken: list[Treatment] = []
    with ExitStack() as stack:
        for treatment in best:
            if treatment.name.startswith("compile") and any(each.name.startswith("compile") for each in taken):
                continue
            if treatment.refuses(loop):
                continue
            try:
                loop = stack.enter_context(treatment.applied(loop))
            except Exception:
                continue
            taken.append(treatment)
    return tuple(taken)


def _name(treatments: Sequence[Treatment]) -> str:
    return " + ".join(treatment.name for treatment in treatments)


def _lines(treatments: Sequence[Treatment]) -> tuple[str, ...]:
    return tuple(line for treatment in treatments for line in treatment.lines)


def _saved(verdict: Verdict) -> float:
    return 0.0 if verdict.saving is None else verdict.saving.mid_ns


def _refused(treatment: Treatment, why: str) -> Verdict:
    return Verdict(treatment=treatment.name, accepted=False, reason=f"does not fit: {why}", parity=_NOT_RUN)


def _unequal(treatments: Sequence[Treatment], parity: Parity) -> Verdict:
    reason = f"not timed, as it changes the numbers more than it claims: {parity.text}"
    return Verdict(treatment=_name(treatments), accepted=False, reason=reason, parity=parity)


def _failed(treatments: Sequence[Treatment], error: BaseException) -> Verdict:
    memory = "out of memory: " if isinstance(error, torch.OutOfMemoryError) else ""
    text = " ".join(str(error).split())[:300]
    reason = f"failed: {memory}{type(error).__name__}: {text}"
    return Verdict(treatment=_name(treatments), accepted=False, reason=reason, parity=_NOT_RUN)


def _judged(
    treatments: Sequence[Treatment], parity: Parity, before: _Side, after: _Side, saving: Estimate, counted: int
) -> Verdict:
    verdict = Verdict(
        treatment=_name(treatments),
        accepted=False,
        reason="",
        parity=parity,
        before=before.step_time(counted),
        after=after.step_time(counted),
        speed_up=SpeedUp.of(saving, float(np.median(before.times_ns))),
        saving=saving,
        peak_memory_before_bytes=before.peak_bytes,
        peak_memory_after_bytes=after.peak_bytes,
    )
    if saving.num_pairs < FEWEST_PAIRS:
        return replace(verdict, reason=f"only {saving.num_pairs} pairs of blocks fitted into the time: not decided")
    if not saving.certain:
        return replace(verdict, reason="no difference: the interval holds zero")
    if saving.mid_ns < 0:
        return replace(verdict, reason="slower")
    if parity.kept is None:
        return replace(verdict, reason=f"faster, but the losses could not be compared: {parity.text}")
    return replace(verdict, accepted=True, reason=f"faster, {parity.text}", lines=_lines(treatments))
