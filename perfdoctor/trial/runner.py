"""The trial of a running loop: suspects observed, then switched off and on in blocks of steps, then everything back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perfdoctor.diagnose.finding import Diagnosis
from perfdoctor.trial.arms import Arm, fix_order, joint_arms, measured_arm, name_of, saving_of, single_arms
from perfdoctor.trial.broken_arm import BrokenArm, broken_by, judged_without
from perfdoctor.trial.call_hooks import CallHooks, Place
from perfdoctor.trial.clock import BlockClock
from perfdoctor.trial.estimate import (
    FEWEST_PAIRS,
    Estimate,
    claimed,
    half_width,
    paired,
    plain_means,
    steady_means,
)
from perfdoctor.trial.loader_replay import LoaderReplay
from perfdoctor.trial.neutraliser import OFF
from perfdoctor.trial.outcome import ArmResult, Refusal, TrialOutcome, with_savings
from perfdoctor.trial.reached_lines import ReachedLines
from perfdoctor.trial.schedule import BASE, EDGE, FEWEST_ROUNDS, Block, Layout, lay_out
from perfdoctor.trial.suspects import MOST_SUSPECTS, Suspect
from perfdoctor.units import format_ms, format_plural

OBSERVED_STEPS = 8
MOST_OBSERVED_STEPS = 32  # where the line of a suspect has not run by then: it may do so every tenth step
_OBSERVED_SHARE = 0.1  # of the time
_OVERTIME = 1.25
_HOST_BOUND = 0.4  # device busy for less of the step: taking one suspect out cannot make the device the bound
_CHECK_EVERY = 8  # rounds between two looks at whether the intervals are narrow enough
_NARROW = 0.003  # of the step: half an interval, then the time goes to the other arms
_SINGLES_SHARE = 0.75  # of the time, where the first few fixes are then to be tried together
_ROUNDS_WITH_BOUNDS = 12  # where fewer fit, bounds are not tried at all
_NARROW_BOUND = 0.02  # of a bound, which nobody acts on


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long the blocks may take in all; `steps` counts the observed ones too."""

    steps: int = 100_000
    seconds: float = 120.0


class Trial:
    """Give it the end of every step; when its blocks are over it removes everything and calls `ended()`."""

    def __init__(
        self,
        diagnosis: Diagnosis,
        suspects: Sequence[Suspect],
        replay: LoaderReplay,
        *,
        limits: Limits | None = None,
        most: int = MOST_SUSPECTS,
        clock: BlockClock | None = None,
        ended: Callable[[], None] = lambda: None,
        timed: bool = True,
        broken: Sequence[BrokenArm] = (),
    ) -> None:
        self.over = False
        self.broken: BrokenArm | None = None  # what was on when the script died
        self._failure = ""  # what it died of
        self._excluded = broken  # in earlier runs of the script
        self._diagnosis = diagnosis
        self._suspects = suspects
        self._replay = replay
        self._limits = limits or Limits()
        self._most = most
        self._left_out = 0
        self._clock = clock or BlockClock()
        self._ended = ended
        self._timed = timed  # False: only steps are counted, as where ranks must agree
        self._hooks = CallHooks()
        self._lines = ReachedLines(place for each in suspects if (place := _line_of(each)) is not None)
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
        self._trying: list[int] = []  # arms whose interval is not narrow yet
        self._next_look = 0
        self._late = self._joined = False
        self._planned_ns = 0.0  # of a step, when the blocks were laid out
        self._base_ns = 0.0
        self._host_only = True  # stamps have no event: nothing runs behind the host

    def start(self) -> None:
        """Hook everything and begin to observe. Undone by `finish`, and by an error in here."""
        self._started_ns = time.perf_counter_ns()
        try:
            for neutraliser in self._neutralisers:
                self._hooks.group = neutraliser
                neutraliser.install(self._hooks)
            self._hooks.install()
            self._replay.install()
            self._lines.install()
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
            self._host_only = getattr(stamp, "event", None) is None
            if self._in_block >= OBSERVED_STEPS and not self._looks_on():
                self._lines.remove()
                self._plan()
            return
        block = self._blocks[self._at]
        if self._in_block == block.edge:
            self._clock.begin(stamp)
        elif self._in_block > block.edge:
            self._clock.tick(stamp)
            if self._in_block == block.steps:
                self._clock.end(block.arm)
                self._clock.drain(stamp)
                self._begin_block()

    def _looks_on(self) -> bool:
        """Whether a line that has not run yet is worth some more steps."""
        few = self._in_block < min(MOST_OBSERVED_STEPS, _OBSERVED_SHARE * self._limits.steps)
        return self._lines.waiting and few and self.spent_s < _OBSERVED_SHARE * self._limits.seconds

    @property
    def spent_s(self) -> float:
        """How long it has run by now."""
        return (time.perf_counter_ns() - self._started_ns) / 1e9

    def how_far(self) -> str:
        """For whoever waits: 'trial, block 12 of 240, 3 of at most 120 s'."""
        block = "looking at the loop" if self._at < 0 else f"block {self._at + 1} of {len(self._blocks)}"
        return f"trial, {block}, {self.spent_s:.0f} of at most {self._limits.seconds:g} s"

    def fail(self, failure: str) -> None:
        """The script died of `failure`. What was on then has no result, and is in `broken`."""
        self._failure = failure
        arm = self._blocks[self._at].arm if 0 <= self._at < len(self._blocks) else BASE
        if arm != BASE:
            self.broken = broken_by(self._arms[arm], failure, self._arms)

    def finish(self) -> None:
        """Switch everything off and take it back. Safe to call twice."""
        if self.over:
            return
        self.over = True
        with ExitStack() as stack:  # one that fails keeps no other from being put back
            stack.callback(self._lines.remove)
            stack.callback(self._replay.remove)
            stack.callback(self._hooks.remove)
            for neutraliser in self._neutralisers:
                stack.callback(neutraliser.remove)
                stack.callback(neutraliser.switch, OFF)

    def _plan(self) -> None:
        """The observed steps are over: who can be tried, in how many rounds."""
        step_ns = self._planned_ns = self._step_ns()
        able: list[Suspect] = []
        edge = self._edge()
        for i, suspect in enumerate(self._suspects):
            neutraliser = suspect.neutraliser
            if neutraliser is not None:
                neutraliser.settle(edge)
            if neutraliser is not None and len(able) >= self._most:  # not asked: an answer may take a graph capture
                neutraliser.observing = False
                self._left_out += 1
                continue
            why = suspect.refusal if neutraliser is None else neutraliser.refusal()
            if neutraliser is not None:
                neutraliser.observing = False
            if why or neutraliser is None:
                self._refusals[i] = self._not_run(suspect) or why
            else:
                able.append(suspect)
        self._arms = self._allowed(single_arms(able))
        self._lay_out(step_ns)
        self._hooks.keep({id(each): each for arm in self._arms for each, _ in arm.switches}.values())
        self._begin_block()

    def _allowed(self, arms: Sequence[Arm]) -> list[Arm]:
        return [arm for arm in arms if not any(each.excludes(arm) for each in self._excluded)]

    def _not_run(self, suspect: Suspect) -> str:
        """That the line of a suspect did not run: whatever else its neutraliser has not seen has no other reason."""
        place = _line_of(suspect)
        if place is None or not self._lines.missing(place) or place in self._hooks.reached:
            return ""  # (what is traced is one thread; on a GPU, hooks of a backward pass run in another)
        return f"its line did not run in the {format_plural(self._in_block, 'step')} that the trial looked at"

    def _lay_out(self, step_ns: float) -> None:
        """Fewer arms where the time does not suffice for rounds enough: those of bounds go first, the cheapest next."""
        while self._arms:
            arms = range(len(self._arms))
            predictions = sum(arm.mode.prediction and arm.finding is not None for arm in self._arms)
            share = _SINGLES_SHARE if predictions > 2 else 1.0
            layout = self._layout(arms, step_ns, share * self._limits.seconds * 1e9)
            self._blocks, self._counted, self._rounds = list(layout.blocks()), layout.counted, layout.rounds
            self._trying = list(arms)
            self._next_look = 2 * len(self._arms) * 2 * _CHECK_EVERY
            bounds = [arm for arm in self._arms if not arm.mode.prediction]
            if layout.rounds >= (_ROUNDS_WITH_BOUNDS if bounds else FEWEST_ROUNDS) or len(self._arms) == 1:
                return
            dropped = bounds[-1] if bounds else self._arms[-1]
            self._arms.remove(dropped)
            self._dropped.append(name_of(dropped))
        self._blocks, self._rounds = [], 0

    def _layout(self, arms: Sequence[int], step_ns: float, max_ns: float) -> Layout:
        modes = [self._arms[i].mode for i in arms]
        return lay_out(
            step_ns,
            [self._arms[i].edge for i in arms],
            [self._arms[i].base_edge for i in arms],
            max_steps=self._limits.steps - self._num_steps,
            max_ns=max_ns,
            multiple=max((arm.mode.multiple for arm in self._arms if arm.mode.everywhere), default=1),
            multiples=[mode.multiple for mode in modes],
        )

    def _edge(self) -> int:
        """Uncounted steps of an arm's block: one where the host sets the pace, with or without a suspect.

        Where the device may, the first step still reads, the second begins with an idle device, and the third with
        the queue that lasts.
        """
        accounting = self._diagnosis.accounting
        if accounting is None:
            return 1 if self._host_only else EDGE
        return 1 if accounting.busy_ns < _HOST_BOUND * accounting.window_ns else EDGE

    def _step_ns(self) -> float:
        step = self._diagnosis.step
        host_ns = (time.perf_counter_ns() - self._started_ns) / max(self._num_steps, 1)
        return max(host_ns, float(step.median_ns) if step is not None else 0.0)

    def _begin_block(self) -> None:
        self._at += 1
        self._in_block = 0
        spent_ns = time.perf_counter_ns() - self._started_ns
        self._late = self._timed and spent_ns > _OVERTIME * self._limits.seconds * 1e9
        if self._timed and not self._late:
            self._look()
        if self._at >= len(self._blocks) or self._late:
            self.finish()
            self._ended()
            return
        arm = self._blocks[self._at].arm
        on = () if arm == BASE else self._arms[arm].switches
        modes = {id(neutraliser): mode for neutraliser, mode in on}
        for neutraliser in self._neutralisers:
            neutraliser.switch(modes.get(id(neutraliser), OFF))

    def _look(self) -> None:
        """Now and then: where some intervals are narrow, the time left goes to the other arms, then to joints.

        What the joints leave of it, or all where there are none, goes to the arms whose interval is still wide.
        """
        if self._next_look <= self._at < len(self._blocks):
            wide = self._wide()
            if len(wide) < len(self._trying):
                self._go_on_with(wide)
            self._next_look = self._at + 2 * len(self._trying) * _CHECK_EVERY
        if self._at >= len(self._blocks) and self._arms and not self._joined:
            self._joined = True
            first = len(self._arms)
            self._arms += self._allowed(joint_arms(self._arms, self._so_far(), self._base_ns))
            self._go_on_with(range(first, len(self._arms)))
        if self._at >= len(self._blocks) and self._joined:
            self._go_on_with(self._wide())

    def _go_on_with(self, arms: Sequence[int]) -> None:
        del self._blocks[self._at :]
        self._trying = list(arms)
        self._blocks += self._again(self._trying)
        self._next_look = self._at + 2 * len(self._trying) * _CHECK_EVERY

    def _wide(self) -> list[int]:
        return [i for i, each in enumerate(self._so_far()) if each is None or not self._is_narrow(i, each)]

    def _so_far(self) -> list[Estimate | None]:
        times = self._clock.times()  # of blocks that the device has left behind
        steady, plain = steady_means(times), plain_means(times)
        self._base_ns = float(np.median([ns for arm, ns in steady if arm == BASE] or [0.0]))
        return [measured_arm(arm, _pairs(plain if arm.mode.rare else steady, i)) for i, arm in enumerate(self._arms)]

    def _is_narrow(self, arm: int, measured: Estimate) -> bool:
        limit = _NARROW if self._arms[arm].mode.prediction else _NARROW_BOUND
        return half_width(measured) < limit * self._base_ns

    def _again(self, arms: Sequence[int]) -> list[Block]:
        """Blocks of some of the arms for the time that is left. The first, a base block, follows an arm or a base."""
        spent_ns = time.perf_counter_ns() - self._started_ns
        step_ns = spent_ns / max(self._num_steps, 1)
        layout = self._layout(arms, step_ns, self._limits.seconds * 1e9 - spent_ns)
        blocks = [replace(b, arm=b.arm if b.arm == BASE else arms[b.arm]) for b in layout.blocks()]
        late = max((arm.base_edge for arm in self._arms), default=1)  # whatever stood before
        return [replace(blocks[0], edge=blocks[0].edge + late), *blocks[1:]] if blocks else []

    def outcome(self) -> TrialOutcome:
        """What was measured. Waits for the device."""
        times = self._clock.times()
        steady, plain = steady_means(times), plain_means(times)
        base = np.array([ns for arm, ns in steady if arm == BASE] or [0.0])
        pairs = [_pairs(plain if arm.mode.rare else steady, i) for i, arm in enumerate(self._arms)]
        middle = float(np.median(base))
        results = [row for arm, each in zip(self._arms, pairs, strict=True) if (row := self._result(arm, each, middle))]
        outcome = TrialOutcome(
            diagnosis=self._diagnosis,
            arms=tuple(results),
            refused=tuple(Refusal(finding=self._suspects[i].finding, why=why) for i, why in self._refusals.items()),
            base_ns=round(middle),
            base_low_ns=round(float(np.quantile(base, 0.25))),
            base_high_ns=round(float(np.quantile(base, 0.75))),
            num_steps=self._num_steps,
            counted=self._counted,
            rounds=min((row.num_pairs for row in results), default=0),
            left_out=self._left_out,
            complete=0 < len(self._blocks) == len(times),
            notes=tuple(self._notes(len(times))),
            failure=self._failure,
        )
        if self.broken is not None:
            outcome = judged_without(self.broken, outcome)
        order, notes = fix_order(outcome)
        return replace(outcome, diagnosis=with_savings(outcome), order=order, notes=(*outcome.notes, *notes))

    def _result(self, arm: Arm, differences: Any, base_ns: float) -> ArmResult | None:
        measured = measured_arm(arm, differences)
        if measured is None:
            return None
        measured = claimed(measured, base_ns)
        return ArmResult(
            finding=arm.finding,
            mode=arm.mode.name,
            text=arm.mode.text,
            prediction=arm.mode.prediction,
            saving=saving_of(measured, arm.mode.text, self._counted),
            num_pairs=measured.num_pairs,
        )

    def _notes(self, num_blocks: int) -> list[str]:
        notes = [f"{name} was not tried: the time does not suffice for enough rounds" for name in self._dropped]
        steps = format_plural(self._num_steps, "step")
        notes += [remark for neutraliser in self._neutralisers if (remark := neutraliser.remark())]
        died = f"the script failed ({self._failure}); " if self._failure and self.broken is None else ""
        if self._at < 0:
            notes.append(f"{died}the loop ended after {steps} of the trial, before the first block")
        elif self._arms and self._rounds < FEWEST_ROUNDS:
            notes.append(self._too_short())
        elif num_blocks < len(self._blocks):
            more = "" if self._failure else ". Give it more --seconds" if self._late else ". Let the loop run longer"
            notes.append(
                f"{died}the trial ended after {num_blocks} of {len(self._blocks)} blocks ({steps}): intervals are "
                f"wider; with fewer than {FEWEST_PAIRS} pairs nothing is claimed{more}"
            )
        return notes

    def _too_short(self) -> str:
        """That too few rounds fit for a claim, and what would."""
        layout = self._layout(range(len(self._arms)), self._planned_ns, 0.0)
        steps = replace(layout, rounds=FEWEST_ROUNDS).steps + OBSERVED_STEPS
        seconds = math.ceil(steps * self._planned_ns / 1e9)
        step = format_ms(round(self._planned_ns))
        if seconds > self._limits.seconds:
            return f"{self._limits.seconds:g} s are too few for steps of {step}: give it --seconds {seconds} or more"
        return f"{format_plural(self._limits.steps, 'step')} are too few: give it --steps {steps} or more"


def _line_of(suspect: Suspect) -> Place | None:
    """The line that a neutraliser waits for; None where it acts on the whole loop, or the line is not the call's."""
    site = suspect.finding.site
    return Place.of(site) if suspect.neutraliser is not None and site is not None and site.exact else None


def _pairs(times: Sequence[tuple[int, float]], arm: int) -> Any:
    """What each block of an arm saves against the base blocks on both sides. Shape (n,), ns."""
    at = [i for i in range(1, len(times) - 1) if times[i][0] == arm and times[i - 1][0] == times[i + 1][0] == BASE]
    return paired([times[i - 1][1] for i in at], [times[i][1] for i in at], [times[i + 1][1] for i in at])
