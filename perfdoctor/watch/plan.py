"""The schedule of a session, and one row for each step that it watched."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from perfdoctor.watch.clocks import Stamp


class Stage(IntEnum):
    """The phases of a session, in order."""

    WARMUP = 0
    BARE = 1  # nothing hooked but the ends of the steps
    SITES = 2  # call-site hooks
    LIGHT = 3  # call-site hooks and a CUDA-only recording: the timing
    FULL = 4  # CPU and CUDA activities: the names
    DONE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many steps each phase takes. Warm-up goes on past `warmup` while the loop compiles or its memory grows."""

    warmup: int = 5
    active: int = 10
    full: int = 5

    @property
    def longest_warmup(self) -> int:
        """Warm-up ends here at the latest."""
        return 3 * self.warmup + 20

    def length(self, stage: Stage) -> int:
        """Measured steps of a stage."""
        lengths = {Stage.WARMUP: self.warmup, Stage.FULL: min(self.full, self.active), Stage.DONE: 0}
        return lengths.get(stage, self.active)

    def settling(self, stage: Stage) -> int:
        """Steps at the start of a stage that are not measured.

        New call sites are looked up in the first step with hooks; a profiler starts on a drained device, and the
        host needs a step or two to run ahead again. The full recording starts a step after the light one ended: both
        edges lie inside `optimizer.step()`, whose record_function must not begin under one profiler and end under
        another (kineto then writes to memory that it has freed).
        """
        return {Stage.SITES: 1, Stage.LIGHT: 2, Stage.FULL: 2}.get(stage, 0)

    def total(self, stages: tuple[Stage, ...]) -> int:
        """Steps from the first to the last, if warm-up is as short as it can be."""
        return sum(self.length(stage) + self.settling(stage) for stage in stages)


class Row(NamedTuple):
    """One step."""

    stage: Stage
    number: int  # the loop's own count, from 0
    start: Stamp
    end: Stamp
    micro_batches: int
    samples: int
    data_ns: int
    settled: bool
    complete: bool = True
