"""What a check works with: the timeline, the pricing, the idle time still unclaimed, and small measures over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from perfdoctor.diagnose.accounting import IdleClaims, idle_claims
from perfdoctor.diagnose.attribution import SyncGroup, sync_groups
from perfdoctor.diagnose.finding import Finding, Headroom, Severity
from perfdoctor.diagnose.host_lines import HostLines
from perfdoctor.diagnose.pricing import Pricing
from perfdoctor.diagnose.replay import Edits
from perfdoctor.record import intervals
from perfdoctor.record.capture import CallKind, Capture, Ints
from perfdoctor.record.intervals import Intervals
from perfdoctor.record.timeline import StepSpans, Timeline
from perfdoctor.units import format_plural, format_share

# Recordings came out within 4 % (28 of 29 tried, of NVIDIA and AMD devices); beyond this the model does not fit.
MAX_REPLAY_ERROR = 0.12
MAX_MISSING = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A finding with the edits that price it, so that findings can be priced together."""

    finding: Finding
    edits: Edits | None = None


def num_missing_kernels(capture: Capture) -> tuple[int, int] | None:
    """(kernel launches without a kernel, all kernel launches) where over a fifth lack theirs; None else.

    Launches recorded into a CUDA graph have none either, but not that often in a loop worth tracing. Kernels that no
    call claims are there all the same: then only the links are missing.
    """
    calls, work = capture.calls, capture.work
    launches = calls.correlation[calls.kind == CallKind.LAUNCH]
    lost = int((~np.isin(launches, work.correlation)).sum())
    orphans = int((~np.isin(work.correlation, calls.correlation)).sum())
    lost -= min(lost, orphans)
    return (lost, len(launches)) if len(work) and lost > MAX_MISSING * len(launches) else None


class Review:
    """One timeline under review. Checks read it, claim idle time of it and yield `Priced` findings."""

    def __init__(self, timeline: Timeline, missing: tuple[int, int] | None = None) -> None:
        """`missing`: what `num_missing_kernels` says of the capture: (lost, of how many launches)."""
        self.timeline = timeline
        self.missing = missing
        self.pricing = Pricing(timeline)
        self.claims: IdleClaims = idle_claims(timeline)
        self.skipped: list[tuple[str, str]] = []
        if missing is not None:
            self.skip(
                "how busy the GPU was",
                f"{missing[0]} of {missing[1]} launches have no kernel in the recording (a damaged or cut file, or "
                "kernels that were not traced): what looks idle may not be",
            )

    @property
    def capture(self) -> Capture:
        return self.timeline.capture

    @property
    def steps(self) -> StepSpans | None:
        return self.timeline.steps

    @property
    def num_steps(self) -> int:
        return len(self.steps) if self.steps is not None else 1

    @property
    def num_windows(self) -> int:
        """How many device windows the idle time is of; see `StepSpans.judged`."""
        return self.steps.num_judged if self.steps is not None else 1

    @property
    def a_step(self) -> str:
        """' a step' behind a figure; '' where the whole recording stands for the steps that it does not mark."""
        return "" if self.steps is not None and not self.steps.known else " a step"

    @property
    def has_device(self) -> bool:
        """Whether the recording holds host calls and device work: what a replay needs."""
        return len(self.timeline.work) > 0 and len(self.timeline.calls) > 0 and self.steps is not None

    @cached_property
    def call_range(self) -> tuple[int, int]:
        """`[first, last)` of the calls that the steps made on the host."""
        steps, calls = self.steps, self.timeline.calls
        if steps is None or not len(calls):
            return 0, 0
        if not steps.known:
            return 0, self._last_call()
        bounds = (int(steps.host_start_ns[0]), int(steps.host_end_ns[-1]))
        first, last = np.searchsorted(calls.start_ns, bounds)
        return int(first), int(last)

    def _last_call(self) -> int:
        # The profiler's own device-wide sync ends every recording.
        calls = self.timeline.calls
        return len(calls) - 1 if calls.kind[-1] == CallKind.SYNC_DEVICE else len(calls)

    @cached_property
    def lines(self) -> HostLines:
        """Lines that only stack samples know."""
        return HostLines(self.capture)

    @cached_property
    def sync_groups(self) -> tuple[SyncGroup, ...]:
        return sync_groups(self.timeline, *self.call_range)

    def skip(self, check: str, why: str) -> None:
        """Note that a check could not judge, and why."""
        self.skipped.append((check, why))

    def claim(self, code: str, causes: Intervals) -> int:
        """Claim idle time for a code; returns ns a step."""
        return round(intervals.total(self.claims.claim(code, causes)) / self.num_windows)

    def headroom(self, edits: Edits, low: Edits | None = None, high: Edits | None = None) -> Headroom | None:
        """What comes back a step; None where the recording cannot be replayed."""
        return self.pricing.headroom(edits, low, high) if self.replayable else None

    @cached_property
    def replayable(self) -> bool:
        """Whether the replay gives the recorded schedule back; said once where it does not."""
        if not self.has_device or self.missing is not None:
            return False
        off = self.pricing.reproduction
        if abs(off - 1) <= MAX_REPLAY_ERROR:
            return True
        self.skip(
            "what would come back",
            f"the replay gives {format_share(off)} of the recorded step: something held the loop that is not in the "
            "recording (another process, a graph or a stream that was not traced)",
        )
        return False

    def severity(self, headroom: Headroom | None) -> Severity:
        """`minor` where under 1 % of the step would come back."""
        if headroom is None or not self.pricing.reference_ns:
            return Severity.COST
        return Severity.COST if headroom.mid_ns >= 0.01 * self.pricing.reference_ns else Severity.MINOR

    def per_step(self, count: float) -> float:
        return count / self.num_steps

    def per_micro_batch(self, count: float) -> float | None:
        batches = self.steps.micro_batches if self.steps is not None else 0
        return count / self.num_steps / batches if batches > 1 else None

    @property
    def unpriced(self) -> str:
        """Why a finding has no milliseconds: for `Finding.withheld`."""
        if not self.has_device:
            return "no device recording: what comes back needs a GPU"
        return "the recording does not tell: see 'Not judged'"

    @property
    def basis(self) -> str:
        """What the milliseconds rest on, for people."""
        if not self.has_device:
            return "host recording"
        steps = self.pricing.replay
        kind = "full" if len(self.capture.ops) else "CUDA-only"
        noun = "turn" if self.steps is not None and self.steps.origin == "repetition" else "step"
        span = format_plural(steps.num_steps, noun) if steps.steady else "the whole window"
        return f"replay of the {kind} recording, {span}"

    @cached_property
    def host_segments(self) -> tuple[Ints, Ints]:
        """For every call the host time before it: `(start, end)` since the newest end of any call before."""
        calls = self.timeline.calls
        reach = np.maximum.accumulate(calls.end_ns) if len(calls) else calls.end_ns
        starts = np.concatenate((calls.start_ns[:1], reach[:-1])).astype(np.int64)
        return np.minimum(starts, calls.start_ns), calls.start_ns

    def saved_by(self, pauses: Intervals) -> dict[int, int]:
        """Host time before each call that lies inside `pauses`: what `Edits.host_saved_ns` takes."""
        lengths = intervals.covered(pauses, *self.host_segments)
        saved = {int(i): int(lengths[i]) for i in np.flatnonzero(lengths)}
        edges = self.pricing.replay.edges
        if edges is not None:
            saved[self.pricing.replay.rounds.first] = int(intervals.covered(pauses, *edges).sum())
        return saved

    def inside_steps(self, spans: Intervals) -> Intervals:
        """The part of host spans inside the steps."""
        if self.steps is None:
            return intervals.EMPTY
        return intervals.clip(spans, int(self.steps.host_start_ns[0]), int(self.steps.host_end_ns[-1]))
