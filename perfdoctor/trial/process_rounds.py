"""Treatments on trial in processes: the script from its start without, with, with, without, ... and paired differences.

For what one process cannot switch back (live_obstacles.py). A round is one process as the script is and one for each
treatment; every other round goes backwards (A B B A for one treatment), so that a drift in a straight line cancels.
Before the rounds one process runs whose times do not count: it fills caches, says how many steps fit, and its losses
are what the others are held to. Losses come first: a treatment whose losses are off is not run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from perfdoctor.treat.treatment import Treatment
from perfdoctor.trial.estimate import FEWEST_PAIRS, claimed, estimate, paired, steady_means
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
from perfdoctor.trial.process_run import ProcessRun
from perfdoctor.trial.verdict import SPENT, Side, Verdict, joined_name, judged, not_run, unequal, untried

MOST_ROUNDS = 10

# Names of the treatments, counted steps (0: as many as fit), whether to note losses without dropout too.
# None where the time is spent.
Runner = Callable[[tuple[str, ...], int, bool], ProcessRun | None]


@dataclass(slots=True, kw_only=True)
class Candidate:
    """Treatments to try together, and why in processes. `runs` are those of its rounds, None where one gave nothing."""

    treatments: tuple[Treatment, ...]
    why: str
    runs: list[ProcessRun | None] = field(default_factory=list)
    parity: Parity | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.treatments)

    @property
    def name(self) -> str:
        return joined_name(self.treatments)


class ProcessRounds:
    """Judges candidates by running processes until `until` (on the clock `now`, in s)."""

    def __init__(
        self, run: Runner, *, until: float, most_rounds: int = MOST_ROUNDS, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.num_processes = 0
        self.notes: dict[str, None] = {}
        self._run_process = run
        self._until = until
        self._most_rounds = max(min(most_rounds, MOST_ROUNDS), FEWEST_PAIRS)
        self._now = now
        self._first: ProcessRun | None = None
        self._base: list[ProcessRun | None] = []
        self._alike: list[ProcessRun] = []  # untreated, whose losses the others are held to
        self._spent = False

    def judge(self, candidates: Sequence[Candidate]) -> list[Verdict]:
        """A verdict for each candidate, in their order; none for a set of which one alone fits."""
        if self._first is None:
            self._first = self._run((), dry=True)
        if self._first is None or not self._first.step_ns:
            why = SPENT if self._first is None else f"as it is, in a process of its own: {self._first.failure}"
            return [untried(each.name, why) for each in candidates]
        taken = self._affordable(candidates, self._first.seconds)
        verdicts = {id(each): untried(each.name, self._too_long(self._first.seconds)) for each in candidates}
        for each in taken:
            del verdicts[id(each)]
        self._base = []
        self._go_round(taken, verdicts)
        for each in taken:
            if id(each) not in verdicts and len(each.treatments) > 0:
                verdicts[id(each)] = self._judged(each)
        return [verdicts[id(each)] for each in candidates if each.treatments]

    def _left(self) -> float:
        return self._until - self._now()

    def _affordable(self, candidates: Sequence[Candidate], seconds: float) -> list[Candidate]:
        """As many as six rounds of processes are likely to suffice for."""
        sides = int(self._left() / (FEWEST_PAIRS * max(seconds, 1e-3)))
        return list(candidates[: max(sides - 1, 0)])

    def _too_long(self, seconds: float) -> str:
        needed = 2 * FEWEST_PAIRS * seconds
        return (
            f"it takes {2 * FEWEST_PAIRS} processes of about {seconds:.1f} s, {needed:.0f} s in all, and "
            f"{max(self._left(), 0):.0f} s were left (--seconds)"
        )

    def _go_round(self, taken: Sequence[Candidate], verdicts: dict[int, Verdict]) -> None:
        for number in range(self._most_rounds):
            began = self._now()
            running = [each for each in taken if id(each) not in verdicts and each.treatments]
            if not running:
                return
            sides: list[Candidate | None] = [None, *running]
            for side in sides if number % 2 == 0 else reversed(sides):
                if side is None:
                    self._base.append(self._run((), dry=number == 0))
                else:
                    self._treat(side, verdicts, dry=number == 0)
                if self._spent:
                    return
            if number == 1:  # what was compiled in the first round is found again by now
                self._give_up_dear([each for each in running if id(each) not in verdicts and each.treatments], verdicts)
            if number + 1 >= FEWEST_PAIRS and self._now() - began > self._left():
                return

    def _give_up_dear(self, running: list[Candidate], verdicts: dict[int, Verdict]) -> None:
        """Leave out whose processes take so long that six rounds do not fit, the longest first."""
        took = {id(each): each.runs[-1].seconds if each.runs[-1] else 0.0 for each in running}
        base = self._base[-1].seconds if self._base[-1] else 0.0
        while running and (FEWEST_PAIRS - 2) * (base + sum(took[id(each)] for each in running)) > self._left():
            dearest = max(running, key=lambda each: took[id(each)])
            running.remove(dearest)
            why = (
                f"a process with it takes {took[id(dearest)]:.1f} s, one as it is {base:.1f} s: {FEWEST_PAIRS} of each "
                "do not fit into the time (--seconds)"
            )
            parity = dearest.parity or NOT_COMPARED
            verdicts[id(dearest)] = self._told(dearest, replace(untried(dearest.name, why), parity=parity))

    def _treat(self, side: Candidate, verdicts: dict[int, Verdict], *, dry: bool) -> None:
        run = self._run(side.names, dry=dry)
        side.runs.append(run)
        if run is None:
            return
        if not run.step_ns:
            verdicts[id(side)] = self._told(side, not_run(side.name, run.failure, blamed=run.started))
            return
        if run.names != side.names:  # of a set, those that fit beside each other
            side.treatments = tuple(each for each in side.treatments if each.name in run.names)
            if len(side.treatments) < 2:
                side.treatments = ()
                return
        if side.parity is None:
            side.parity = self._compared(side, run)
            if side.parity.kept is False:
                verdicts[id(side)] = self._told(side, unequal(side.name, side.parity))

    def _run(self, names: tuple[str, ...], *, dry: bool) -> ProcessRun | None:
        counted = 0 if self._first is None else len(self._first.step_ns)
        began = self._now()
        run = None if self._left() <= 0 else self._run_process(names, counted, dry)
        if run is None:
            self._spent = True
            return None
        self.num_processes += 1
        self.notes.update(dict.fromkeys(run.notes))
        return replace(run, seconds=self._now() - began)

    def _compared(self, side: Candidate, run: ProcessRun) -> Parity:
        """Its losses against those of processes as the script is, two at first."""
        if self._first is None or self._base[0] is None or not self._base[0].step_ns:
            return Parity(kept=None, text="the script as it is failed the second time")
        if not self._alike:
            self._alike = [self._first, self._base[0]]
        runs = [run]
        parity = self._settled(side, runs, dry=False)
        if parity.kept is False and run.dry_losses:
            without = self._settled(side, runs, dry=True)
            if without.kept:
                return replace(without, text=f"{without.text} (compared without dropout, whose masks are others)")
        return parity

    def _settled(self, side: Candidate, runs: list[ProcessRun], *, dry: bool) -> Parity:
        """Of treated runs, with more of both sides where a difference may come by chance. `dry`: without dropout.

        Four more treated ones at most: fewer than the rounds that it would have been timed in.
        """
        found = self._parities(side, runs, dry=dry)
        base = self._alike[0].dry_losses if dry else self._alike[0].losses
        while is_doubtful(found[0], base) and len(self._alike) < MOST_BASES:
            if not self._run_again((), self._alike):
                break
            found = self._parities(side, runs, dry=dry)
        while is_open(found, base) and self._run_again(side.names, runs):
            found = self._parities(side, runs, dry=dry)
        return pooled(found, base)

    def _parities(self, side: Candidate, runs: Sequence[ProcessRun], *, dry: bool) -> list[Parity]:
        """Of each of `runs`, held against all untreated ones."""
        allowed = Allowed.of(side.treatments)
        bases, treated = ([each.dry_losses if dry else each.losses for each in of] for of in (self._alike, runs))
        return [judge_parity(bases, losses, allowed) for losses in treated]

    def _run_again(self, names: tuple[str, ...], into: list[ProcessRun]) -> bool:
        """For its losses. Whether it came to any."""
        run = self._run(names, dry=True)
        if run is None or not run.step_ns:
            return False
        into.append(run)
        return True

    def _judged(self, side: Candidate) -> Verdict:
        pairs = [(a, b) for a, b in zip(self._base, side.runs, strict=False) if a and b and a.step_ns and b.step_ns]
        if not pairs or side.parity is None:
            return self._told(side, untried(side.name, SPENT))
        counted = len(pairs[0][0].step_ns)
        blocks = [(arm, np.array(run.step_ns, np.float64)) for pair in pairs for arm, run in enumerate(pair)]
        means = steady_means(blocks)
        times = [tuple(ns for arm, ns in means if arm == side_of) for side_of in (0, 1)]
        peaks = [[run.peak_bytes for run in runs if run.peak_bytes is not None] for runs in zip(*pairs, strict=True)]
        before, after = (
            Side(times_ns=ns, counted=counted, peak_bytes=max(peak, default=None), unit="processes")
            for ns, peak in zip(times, peaks, strict=True)
        )
        saving = claimed(estimate(paired(times[0], times[1], times[0])), float(np.median(times[0])))
        last = pairs[-1][1]
        verdict = judged(side.name, side.parity, before, after, saving, last.lines, last.setting)
        return self._told(side, verdict)

    def _told(self, side: Candidate, verdict: Verdict) -> Verdict:
        """The verdict with the processes that stand behind it."""
        num = sum(run is not None for run in (*self._base, *side.runs))
        return replace(verdict, num_processes=num, why_processes=side.why)
