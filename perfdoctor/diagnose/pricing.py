"""What would come back: replays with one cause taken away, at three guesses of what tracing cost the host."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from perfdoctor.diagnose.finding import Headroom
from perfdoctor.diagnose.host_time import UNTRACED
from perfdoctor.diagnose.replay import Edits, Replay
from perfdoctor.diagnose.tracing_cost import measured_call_ns
from perfdoctor.record.capture import CallKind, Costs
from perfdoctor.record.timeline import Timeline

# Launches that follow each other in one C++ loop take what the host takes for a launch and what the tracer adds. Three
# host-bound loops recorded on an H200's host (7.8, 8.2 and 13.7 us traced) and run bare imply 0.6, 2.7 and 10.2 us a
# call: 1.35 times what lies above 6.5 us. A fast host stays below that; there a fifth is taken. The spread is stated.
_UNTRACED_LAUNCH_NS = 6_500
_TRACED_SLOPE = 1.35
_TRACED_SHARE = 0.2
_BACK_TO_BACK = 5  # percentile of the intervals between launches that stands for such a loop
_SPREAD = 0.7  # how far a guessed cost may be off; a guessed share half as far
_SPREAD_MEASURED = 0.8  # tight launches against real loops: see _fitted
_SPREAD_IN_LOOP = 0.4  # one phase of a loop against another: 4 and 10 us a call at most on an H200's host
_FIT_STEPS = 8
_SHARES = (-0.5, 0.9)
_FITS = 0.05  # within this the measured costs give the bare step as they are
# Twelve recorded H200 loops came out of the replay within 0.3 % of the recorded step (median; worst 4 %).
_REPLAY_ERROR = 0.01


class Pricing:
    """Prices edits on one timeline.

    `step_ns`: the step (or window) that the likeliest replay gives; `scale`: bare step over that, 1 where no bare step
    was measured. Headroom is given on the scale of the bare step.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        plain = Replay(timeline, UNTRACED)
        self._plain = plain
        self._replays = tuple(_fitted(plain.with_costs(costs)) for costs in _cost_levels(timeline))
        self.costs = tuple(replay.costs for replay in self._replays)

    @property
    def replay(self) -> Replay:
        """The replay at the likeliest costs."""
        return self._replays[1]

    @cached_property
    def bases(self) -> tuple[int, ...]:
        return tuple(replay.period_ns() for replay in self._replays)

    @property
    def step_ns(self) -> int:
        return self.bases[1]

    @cached_property
    def scale(self) -> float:
        bare = self.bare_step_ns
        return bare / self.step_ns if bare and self.step_ns else 1.0

    @property
    def bare_step_ns(self) -> int | None:
        bare = self.timeline.capture.bare
        return int(np.median(bare.step_ns)) if bare is not None and len(bare.step_ns) else None

    @property
    def reference_ns(self) -> int:
        """The step that shares are shares of: bare where measured, else replayed, else recorded."""
        return self.bare_step_ns or self.step_ns or self.replay.recorded_ns()

    @cached_property
    def reproduction(self) -> float:
        """The replayed over the recorded step, nothing taken away and nothing corrected: 1 where the model holds."""
        plain = self._plain
        period = plain.period_ns()
        ratios = [period / recorded for recorded in (plain.recorded_ns(), plain.host_recorded_ns()) if recorded]
        return min(ratios, key=lambda ratio: abs(ratio - 1), default=1.0)

    def headroom(self, edits: Edits, low: Edits | None = None, high: Edits | None = None) -> Headroom:
        """What comes back under the edits; `low` and `high` stand for a weaker and a stronger cure."""
        gains = [
            self._gain(level, each)
            for level in range(len(self._replays))
            for each in ((edits,) if level == 1 else (edits, low or edits, high or edits))
        ]
        middle = self._gain(1, edits)
        ends = [self._gain(1, each) for each in (low, high) if each is not None]
        doubt = round(_REPLAY_ERROR * self.reference_ns)
        low_ns, high_ns = min(*gains, *ends, middle), max(*gains, *ends, middle)
        return Headroom(low_ns=max(low_ns - doubt, 0), mid_ns=middle, high_ns=high_ns + doubt)

    def joint_ns(self, edits: Edits) -> int:
        """What comes back under the edits at the likeliest costs."""
        return self._gain(1, edits)

    def _gain(self, level: int, edits: Edits) -> int:
        gone = self.bases[level] - self._replays[level].period_ns(edits)
        return max(round(gone * self.scale), 0)


def _cost_levels(timeline: Timeline) -> tuple[Costs, Costs, Costs]:
    """The least, the likeliest and the most that tracing can have cost."""
    given = timeline.capture.costs
    likely = given if given.measured else _estimated(timeline)
    spread = _SPREAD_MEASURED if given.measured else _SPREAD
    in_loop = measured_call_ns(timeline) if given.measured else None
    if in_loop is not None and in_loop > likely.call_ns:  # a tight loop's launches are the least that it costs
        likely, spread = replace(likely, call_ns=in_loop), _SPREAD_IN_LOOP

    def scaled(factor: float) -> Costs:
        return replace(
            likely,
            call_ns=round(likely.call_ns * factor),
            op_ns=round(likely.op_ns * factor),
            full_share=min(likely.full_share * (1 + (factor - 1) / 2), 0.9),
        )

    return (
        replace(scaled(1 - spread), frame_ns=0, builtin_ns=0),
        likely,
        replace(scaled(1 + spread), builtin_ns=max(likely.builtin_ns, likely.frame_ns)),
    )


def _estimated(timeline: Timeline) -> Costs:
    """Costs from the recording itself: nothing measured them."""
    calls = timeline.calls
    if len(calls) < 2:
        return UNTRACED
    launch = calls.kind == CallKind.LAUNCH
    consecutive = launch[1:] & launch[:-1] & (calls.thread[1:] == calls.thread[:-1])
    if not consecutive.any():
        return replace(Costs(), call_ns=0)
    intervals = (calls.end_ns[1:] - calls.end_ns[:-1])[consecutive]
    traced = float(np.percentile(intervals, _BACK_TO_BACK))
    return replace(Costs(), call_ns=round(max(_TRACED_SLOPE * (traced - _UNTRACED_LAUNCH_NS), _TRACED_SHARE * traced)))


def _fitted(replay: Replay) -> Replay:
    """The replay with the share of short host segments at which it gives the bare step.

    Launches in a tight loop measure 3 to 5 us a call for the tracer; real loops on an H200's host lost 8 to 13, because
    the tracer also takes their caches. What the calls leave is spread over the short segments in proportion. A loop
    bound by the device does not say what its host costs: there the measured costs stand.
    """
    bare = replay.timeline.capture.bare
    if bare is None or not len(bare.step_ns) or not len(replay.timeline.calls):
        return replay
    target = float(np.median(bare.step_ns))

    def at(share: float) -> Replay:
        return replay.with_costs(replace(replay.costs, light_share=share))

    if abs(replay.period_ns() / target - 1) <= _FITS:
        return replay
    low, high = _SHARES
    slowest, fastest = at(low).period_ns(), at(high).period_ns()
    if not fastest < target < slowest or slowest - fastest < 0.1 * slowest:
        return replay
    for _ in range(_FIT_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).period_ns() > target else (low, middle)
    return at((low + high) / 2)
