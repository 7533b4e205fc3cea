"""The trial of a running loop: suspects observed, then switched off and on in blocks of steps, then everything back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perfdoctor.diagnose.finding import Diagnosis, Finding, Saving
from perfdoctor.trial.call_hooks import CallHooks
from perfdoctor.trial.clock import BlockClock
from perfdoctor.trial.estimate import FEWEST_PAIRS, Estimate, estimate, estimate_mean, paired, plain_means, steady_means
from perfdoctor.trial.loader_replay import LoaderReplay
from perfdoctor.trial.neutraliser import OFF, Mode, Neutraliser
from perfdoctor.trial.outcome import ArmResult, Refusal, TrialOutcome
from perfdoctor.trial.schedule import BASE, FEWEST_ROUNDS, Block, lay_out
from perfdoctor.trial.suspects import Suspect

OBSERVED_STEPS = 8
MOST_BOUNDS = 2  # arms that are no prediction
_OVERTIME = 1.5
_RARE = 0.2  # of what comes less often a step, the mean is estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long the blocks may take in all; `steps` counts the observed ones too."""

    steps: int = 100_000
    seconds: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What is on in a block: neutralisers with their mode. `finding` is None where all are on together."""

    finding: Finding | None
    mode: Mode
    switches: tuple[tuple[Neutraliser, str], ...]

    @property
    def edge(self) -> int:
        return max(neutraliser.edge for neutraliser, _ in self.switches)

    @property
    def base_edge(self) -> int:
        return max(neutraliser.base_edge for neutraliser, _ in self.switches)


class Trial:
    """Give it the end of every step; when its blocks are over it removes everything and calls `ended()`."""

    def __init__(
        self,
        diagnosis: Diagnosis,
        suspects: Sequence[Suspect],
        replay: LoaderReplay,
        *,
        limits: Limits | None = None,
        left_out: int = 0,
        clock: BlockClock | None = None,
        ended: Callable[[], None] = lambda: None,
        timed: bool = True,
    ) -> None:
        self.over = False
        self._diagnosis = diagnosis
        self._suspects = suspects
        self._replay = replay
        self._limits = limits or Limits()
        self._left_out = left_out
        self._clock = clock or BlockClock()
        self._ended = ended
        self._timed = timed  # False: only steps are counted, as where ranks must agree
        self._hooks = CallHooks()
        self._neutralisers = [s.neutraliser for s in suspects if s.neutraliser is not None]
        self._refusals: dict[int, str] = {}
        self._arms: list[Arm] = []
        self._blocks: list[Block] = []
        self._at = -1  # the running block; -1 while observing
        self._in_block = 0
        self._num_steps = 0
        self._rounds = self._counted = 0
        self._started_ns = 0
        self._dropped: list[str] = []

    def start(self) -> None:
        """Hook everything and begin to observe. Undone by `finish`, and by an error in here."""
        self._started_ns = time.perf_counter_ns()
        try:
            for neutraliser in self._neutralisers:
                neutraliser.install(self._hooks)
            self._hooks.install()
            self._replay.install()
        except BaseException:
            self.finish()
            raise

    def step_ended(self, stamp: Any) -> None:
        """A step ended; `stamp` was taken at its end."""
        if self.over:
            return
        self._num_steps += 1
        self._in_block += 1
        for neutraliser in self._neutralisers:
            neutraliser.stepped()
        if self._at < 0:
            if self._in_block >= OBSERVED_STEPS:
                self._plan()
            return
        block = self._blocks[self._at]
        if self._in_block == block.edge:
            self._clock.begin(stamp)
            self._replay.rewind()
        elif self._in_block > block.edge:
            self._clock.tick(stamp)
            if self._in_block == block.steps:
                self._clock.end(block.arm)
                self._begin_block()

    def finish(self) -> None:
        """Switch everything off and take it back. Safe to call twice."""
        if self.over:
            return
        self.over = True
        try:
            for neutraliser in self._neutralisers:
                neutraliser.switch(OFF)
                neutraliser.remove()
        finally:
            self._hooks.remove()
            self._replay.remove()

    def _plan(self) -> None:
        """The observed steps are over: who can be tried, in how many rounds."""
        step_ns = self._step_ns()
        able = []
        for i, suspect in enumerate(self._suspects):
            neutraliser = suspect.neutraliser
            why = suspect.refusal if neutraliser is None else neutraliser.refusal()
            if neutraliser is not None:
                neutraliser.observing = False
            if why or neutraliser is None:
                self._refusals[i] = why
            else:
                able.append(suspect)
        self._arms = _arms(able)
        self._lay_out(step_ns)
        self._begin_block()

    def _lay_out(self, step_ns: float) -> None:
        """Fewer arms where the time does not suffice for rounds enough: those of bounds go first, the cheapest next."""
        left_ns = self._limits.seconds * 1e9
        left = self._limits.steps - self._num_steps
        while self._arms:
            layout = lay_out(
                step_ns,
                [arm.edge for arm in self._arms],
                [arm.base_edge for arm in self._arms],
                max_steps=left,
                max_ns=left_ns,
                multiple=max(arm.mode.multiple for arm in self._arms),
            )
            self._blocks, self._counted = list(layout.blocks()), layout.counted
            self._rounds = layout.rounds
            if layout.rounds >= FEWEST_ROUNDS or len(self._arms) == 1:
                return
            bounds = [arm for arm in self._arms if not arm.mode.prediction]
            dropped = bounds[-1] if bounds else self._arms[-1]
            self._arms.remove(dropped)
            self._dropped.append(_name(dropped))
        self._blocks, self._rounds = [], 0

    def _step_ns(self) -> float:
        step = self._diagnosis.step
        host_ns = (time.perf_counter_ns() - self._started_ns) / max(self._num_steps, 1)
        return max(host_ns, float(step.median_ns) if step is not None else 0.0)

    def _begin_block(self) -> None:
        self._at += 1
        self._in_block = 0
        late = self._timed and time.perf_counter_ns() - self._started_ns > _OVERTIME * self._limits.seconds * 1e9
        if self._at >= len(self._blocks) or late:
            self.finish()
            self._ended()
            return
        arm = self._blocks[self._at].arm
        on = () if arm == BASE else self._arms[arm].switches
        modes = {id(neutraliser): mode for neutraliser, mode in on}
        for neutraliser in self._neutralisers:
            neutraliser.switch(modes.get(id(neutraliser), OFF))

    def outcome(self) -> TrialOutcome:
        """What was measured. Waits for the device."""
        times = self._clock.times()
        steady, plain = steady_means(times), plain_means(times)
        base = np.array([ns for arm, ns in steady if arm == BASE] or [0.0])
        pairs = [_pairs(plain if arm.mode.rare else steady, i) for i, arm in enumerate(self._arms)]
        results = [row for arm, each in zip(self._arms, pairs, strict=True) if (row := self._result(arm, each))]
        outcome = TrialOutcome(
            diagnosis=self._diagnosis,
            arms=tuple(results),
            refused=tuple(Refusal(finding=self._suspects[i].finding, why=why) for i, why in self._refusals.items()),
            base_ns=round(float(np.median(base))),
            base_low_ns=round(float(np.quantile(base, 0.25))),
            base_high_ns=round(float(np.quantile(base, 0.75))),
            num_steps=self._num_steps,
            counted=self._counted,
            rounds=min((row.num_pairs for row in results), default=0),
            left_out=self._left_out,
            complete=0 < len(self._blocks) == len(times),
            notes=tuple(self._notes(len(times))),
        )
        return replace(outcome, diagnosis=_with_savings(outcome), order=_order(outcome))

    def _result(self, arm: Arm, differences: Any) -> ArmResult | None:
        if not len(differences):
            return None
        measured = estimate_mean(differences) if arm.mode.rare else estimate(differences)
        return ArmResult(
            finding=arm.finding,
            mode=arm.mode.name,
            text=arm.mode.text,
            prediction=arm.mode.prediction,
            saving=_saving(measured, arm.mode.text, self._counted),
            num_pairs=measured.num_pairs,
        )

    def _notes(self, num_blocks: int) -> list[str]:
        notes = [f"{name} was not tried: the time does not suffice for six rounds" for name in self._dropped]
        if self._at < 0:
            notes.append(f"the loop ended after {self._num_steps} steps of the trial, before the first block")
        elif num_blocks < len(self._blocks):
            notes.append(
                f"the trial ended after {num_blocks} of {len(self._blocks)} blocks ({self._num_steps} steps): "
                f"intervals are wider; with fewer than {FEWEST_PAIRS} pairs nothing is claimed. Let the loop run longer"
            )
        return notes


def _arms(suspects: Sequence[Suspect]) -> list[Arm]:
    """One arm for each suspect, a few for bounds, and one with all on."""
    first: list[Arm] = []
    bounds: list[Arm] = []
    for suspect in suspects:
        neutraliser = suspect.neutraliser
        assert neutraliser is not None
        for each in neutraliser.modes:
            mode = replace(each, rare=each.rare or 0 < suspect.finding.count < _RARE)
            arm = Arm(finding=suspect.finding, mode=mode, switches=((neutraliser, mode.name),))
            (first if mode.prediction else bounds).append(arm)
    if len(first) > 1:
        mode = Mode(name="all", text="all together", rare=any(arm.mode.rare for arm in first))
        first.append(Arm(finding=None, mode=mode, switches=tuple(pair for arm in first for pair in arm.switches)))
    return [*first, *bounds[:MOST_BOUNDS]]


def _pairs(times: Sequence[tuple[int, float]], arm: int) -> Any:
    """What each block of an arm saves against the base blocks on both sides. Shape (n,), ns."""
    at = [i for i in range(1, len(times) - 1) if times[i][0] == arm and times[i - 1][0] == times[i + 1][0] == BASE]
    return paired([times[i - 1][1] for i in at], [times[i][1] for i in at], [times[i + 1][1] for i in at])


def _saving(measured: Estimate, text: str, counted: int) -> Saving:
    return Saving(
        median_ns=round(measured.mid_ns),
        low_ns=round(measured.low_ns),
        high_ns=round(measured.high_ns),
        basis=f"trial, {text}: {measured.num_pairs} pairs of blocks of {counted} steps",
    )


def _with_savings(outcome: TrialOutcome) -> Diagnosis:
    def measured(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        rows = ((finding, outcome.result_of(finding)) for finding in findings)
        return tuple(replace(f, measured_saving=row.saving) if row is not None else f for f, row in rows)

    diagnosis = outcome.diagnosis
    return replace(diagnosis, findings=measured(diagnosis.findings), leave_alone=measured(diagnosis.leave_alone))


def _order(outcome: TrialOutcome) -> tuple[Finding, ...]:
    """Suspects that give something back for sure, the most first."""
    rows = [arm for arm in outcome.arms if arm.finding is not None and arm.prediction and arm.saving.low_ns > 0]
    return tuple(arm.finding for arm in sorted(rows, key=lambda arm: -arm.saving.median_ns) if arm.finding is not None)


def _name(arm: Arm) -> str:
    if arm.finding is None:
        return "all suspects together"
    site = arm.finding.site
    where = f"{site.frame.file}:{site.frame.line} " if site is not None else ""
    return f"{where}{arm.finding.code} ({arm.mode.name})"
