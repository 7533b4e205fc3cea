"""The recorder of a live loop: the schedule, and everything that changes while a session runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from perfdoctor.record import crossings
from perfdoctor.record.call_site import HitLog
from perfdoctor.record.capture import Costs, Note
from perfdoctor.watch.barriers import BarrierHook
from perfdoctor.watch.batches import BatchWaits
from perfdoctor.watch.calibration import measure_pinned_copy
from perfdoctor.watch.call_sites import CallSiteHooks
from perfdoctor.watch.clocks import Stamp, cuda_active, num_allocations, stamp_now
from perfdoctor.watch.constructions import OptimizerConstructions
from perfdoctor.watch.garbage import CollectionHook
from perfdoctor.watch.pauses import Pause
from perfdoctor.watch.plan import Plan, Row, Stage
from perfdoctor.watch.profile import FULL, LIGHT, ProfileWindow, Window, detach_tracer, profiler_running
from perfdoctor.watch.ranges import PhaseRanges
from perfdoctor.watch.sampler import StackSampler
from perfdoctor.watch.settling import Settling
from perfdoctor.watch.steps import StepDetector, now
from perfdoctor.watch.sync_guard import allow_sync


class Recorder:
    """Runs the phases one after the other, each edge between two steps. `stop` takes everything back, always.

    `log` is that of an emulated device, which writes its hits there; without one an emulated device that is open when
    the recorder starts is joined, and where there is none the live hooks are used. `profiled` forces the profiled
    phases on or off; by default they run where the loop uses CUDA.
    """

    def __init__(self, plan: Plan, log: HitLog | None = None, profiled: bool | None = None) -> None:
        self.plan = plan
        self.log = log if log is not None else HitLog()
        self.rows: list[Row] = []
        self.pauses: list[Pause] = []
        self.notes: list[Note] = []
        self.costs = Costs()
        self.pinned_bytes_per_s: int | None = None
        self.stage = Stage.WARMUP
        self.finished: Callable[[], None] = lambda: None  # called once, at the end of the last phase
        self.following: Callable[[Stamp], None] | None = None  # gets the ends of the steps after the last phase
        self.steps = StepDetector(stamp_now, self._ended, self._restart)
        self.batches = BatchWaits(self.pauses, self._handed)
        self.windows: dict[Stage, Window] = {Stage.LIGHT: ProfileWindow(LIGHT), Stage.FULL: ProfileWindow(FULL)}
        self.step_closed: Callable[[], None] = lambda: None  # called at the end of each step, before any edge
        self.step_opened: Callable[[int], None] = lambda number: None  # and once the next one begins
        self.ranges = PhaseRanges()
        self.sampler = StackSampler(self.log.sites)
        self.constructions = OptimizerConstructions(self.log.sites)
        self.hooks = CallSiteHooks(self.log)
        self.barriers = BarrierHook(self.log)
        self.emulated = log is not None
        self._joined = False
        self._profiled = profiled
        self._collections = CollectionHook(self.log, self.pauses)
        self._settling = Settling()
        self._start: Stamp | None = None
        self._in_stage = 0
        self._counts = [0, 0, 0]  # micro-batches, samples, ns in the loader since the step began
        self._uses = ((0, 0), (0, 0))  # of the device, when the first and the last step of those looked at ended

    @property
    def leaves_device_alone(self) -> bool:
        """Whether the steps used no CUDA device, though one is there or the script has woken it.

        Told from three steps on: the end of one is known when the next one updates.
        """
        if not (self.emulated or cuda_active()):
            return True
        first, last = self._uses
        return sum(row.complete for row in self.rows) > 2 and first[0] == last[0] and not first[1] + last[1]

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The phases that this loop will go through."""
        recorded = tuple(self.windows) if self._traceable() else ()
        return (Stage.WARMUP, Stage.BARE, Stage.SITES, *recorded)

    @property
    def over(self) -> bool:
        """Whether the last phase has ended."""
        return self.stage == Stage.DONE

    def start(self) -> None:
        """Begin to watch."""
        if not self.emulated and crossings.is_emulated():
            self.emulated = self._joined = True
            crossings.join(self.log)
        self.steps.install()
        self.constructions.install()
        self.ranges.install()
        self.batches.on_request(self.steps.requested)
        self._collections.install()
        self._hook_warnings()
        self._start = stamp_now()

    def set_apart(self) -> None:
        """What has run since the last step ended belongs to no step: an evaluation between two of them.

        Does nothing where the next step has begun: it has its first batch already.
        """
        if self._start is not None and not self.over and not self._counts[0]:
            self._start = stamp_now()

    def stop(self) -> None:
        """End whatever is running and restore everything. The step that was cut short is kept as such."""
        self.following = None
        try:
            if not self.over and self._start is not None:
                if self.stage < Stage.LIGHT:
                    self._look_at_device()
                self._keep(Stamp(now(), None), complete=False)
        finally:
            self._part()
            self._unhook()
            self.ranges.remove()
            self.constructions.remove()
            self.steps.remove()
            self.stage = Stage.DONE

    def _unhook(self) -> None:
        """All but the optimizer hooks, which idle: this runs inside one, while torch iterates over them."""
        self.steps.idle = self.following is None
        for release in (
            self.hooks.remove,
            self.barriers.remove,
            self._collections.remove,
            self.ranges.end,
            self.sampler.stop,
            *(window.stop for window in self.windows.values()),
            self.batches.remove,
        ):
            release()

    def _part(self) -> None:
        if self._joined:
            crossings.leave(self.log)
            self._joined = False

    def _handed(self, samples: int, waited_ns: int) -> None:
        counts = self._counts
        counts[0] += 1
        counts[1] += samples if samples >= 0 and counts[1] >= 0 else -1 - counts[1]
        counts[2] += waited_ns

    def _restart(self) -> None:
        """What was taken for steps were micro-batches: begin again, unless a recording runs or is over."""
        if self.stage in (Stage.WARMUP, Stage.BARE, Stage.SITES):
            self._leave(self.stage)
            self.rows.clear()
            self.stage, self._in_stage = Stage.WARMUP, 0
            self._collections.install()
        self._start = stamp_now()

    def _ended(self, stamp: Stamp) -> None:
        if self.over:
            if self.following is not None:
                self.following(stamp)
            return
        self.step_closed()
        self._keep(stamp, complete=True)
        self._start = stamp
        if self._complete():
            self._advance()
        elif self.stage == Stage.FULL and self._in_stage == 1:
            self._at_edge(lambda: self._record(Stage.FULL))
        if self.stage == Stage.WARMUP:
            self._hook_warnings()
        self.hooks.heal()
        if self.over:
            self._unhook()
            self.finished()
        else:
            self.step_opened(len(self.rows))

    def _keep(self, end: Stamp, *, complete: bool) -> None:
        assert self._start is not None
        micro_batches, samples, data_ns = self._counts
        settled = self._in_stage >= self.plan.settling(self.stage)
        if self.emulated or not self.rows:
            self._look_at_device()
        self.rows.append(
            Row(
                stage=self.stage,
                number=len(self.rows),
                start=self._start,
                end=end,
                micro_batches=micro_batches,
                samples=samples if micro_batches else -1,
                data_ns=data_ns,
                settled=settled,
                complete=complete,
            )
        )
        self._in_stage += 1
        self._counts = [0, 0, 0]

    def _complete(self) -> bool:
        """Whether the running phase has the steps that it needs."""
        plan = self.plan
        if self.stage != Stage.WARMUP:
            return self._in_stage >= plan.length(self.stage) + plan.settling(self.stage)
        settled = self._settling.settled()
        # Ranks must change phases together, or one would wait for the others in a collective.
        return self._in_stage >= plan.warmup and (settled or _distributed() or self._in_stage >= plan.longest_warmup)

    def _advance(self) -> None:
        following = [stage for stage in self.stages if stage > self.stage]
        self._at_edge(lambda: self._change_to(following[0] if following else Stage.DONE))
        self._in_stage = 0

    def _change_to(self, stage: Stage) -> None:
        left = self.windows.get(self.stage)
        if self.stage < Stage.LIGHT <= stage:
            self._look_at_device()
        self._leave(self.stage)
        if stage == Stage.DONE and isinstance(left, ProfileWindow) and cuda_active():
            detach_tracer()
        self.stage = stage
        self._enter(stage)

    def _at_edge(self, change: Callable[[], None]) -> None:
        self.hooks.paused = True
        try:
            with allow_sync("perfdoctor: between two phases"):
                change()
        except Exception as error:  # whatever goes wrong in here must not end the user's loop
            self.notes.append(Note(code="phase-failed", text=f"the phase {self.stage.name.lower()} failed: {error!r}"))
            self.stage = Stage.DONE
        self.hooks.paused = False
        self._start = stamp_now()  # the edge itself belongs to no step

    def _leave(self, stage: Stage) -> None:
        self.ranges.forget_started()
        self.sampler.stop()
        if stage == Stage.WARMUP:
            self.hooks.remove()
            self._collections.remove()
        if stage in self.windows:
            self.windows[stage].stop()

    def _look_at_device(self) -> None:
        """A real one takes 0.1 ms: in the warm-up, and before the recordings, which allocate themselves."""
        if self.emulated:
            use = (crossings.num_ops, 0)
        else:
            use = (num_allocations(), num_allocations("current")) if cuda_active() else (0, 0)
        self._uses = (self._uses[0] if self.rows else use, use)

    def _enter(self, stage: Stage) -> None:
        if stage == Stage.SITES:
            self._hook_calls()
        if stage == Stage.LIGHT:
            self._record(stage)

    def _hook_warnings(self) -> None:
        if not self.emulated and cuda_active():
            self.hooks.catch_warnings()

    def _hook_calls(self) -> None:
        self._collections.install()
        self.ranges.begin()
        self._hook_warnings()
        if self.emulated:  # that device writes its barriers to the log itself
            return
        self.barriers.install()
        if cuda_active():
            self.hooks.patch_calls()

    def _record(self, stage: Stage) -> None:
        window = self.windows[stage]
        if stage == Stage.LIGHT and cuda_active() and not profiler_running():
            sys.modules["torch"].cuda.synchronize()
            window.measure_costs()
            self.pinned_bytes_per_s = measure_pinned_copy()
        if stage == Stage.FULL:
            self.sampler.start()
        if not window.start():
            self.notes.append(Note(code="profiler-busy", text=window.problem))
        self.costs = self.windows[Stage.LIGHT].costs

    def _traceable(self) -> bool:
        return cuda_active() and not self.emulated if self._profiled is None else self._profiled


def _distributed() -> bool:
    distributed: Any = sys.modules["torch"].distributed
    return bool(distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)
