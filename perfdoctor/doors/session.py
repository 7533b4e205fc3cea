"""The context manager: `with perfdoctor.watch() as session`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import GeneratorType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from perfdoctor.diagnose.hit_counts import EMULATED
from perfdoctor.doors.rank_gathering import Gathering
from perfdoctor.errors import SessionError
from perfdoctor.record.call_site import HitLog
from perfdoctor.record.capture import Capture, Note
from perfdoctor.watch.assembly import assemble
from perfdoctor.watch.plan import Plan, Stage
from perfdoctor.watch.recorder import Recorder

if TYPE_CHECKING:
    from perfdoctor.doors.trial import LiveTrial
    from perfdoctor.report.page import Report
    from perfdoctor.report.progress import ProgressLine

T = TypeVar("T")

_EMULATED = Note(
    code=EMULATED,
    text="the loop ran on an emulated CUDA device. Lines and counts are those of a GPU, times are those of the CPU.",
)
_LEFT_ALONE = Note(code=EMULATED, text="the CUDA device was an emulated one")

_PHASES = {
    Stage.WARMUP: "warm-up",
    Stage.BARE: "bare steps",
    Stage.SITES: "steps with call-site hooks",
    Stage.LIGHT: "a CUDA-only recording",
    Stage.FULL: "a full recording",
    Stage.DONE: "the last step",
}

_running: Session | None = None
_lock = threading.Lock()


def watch(
    *,
    warmup: int = 5,
    active: int = 10,
    every_n_steps: int | None = None,
    ranks: Sequence[int] | None = None,
    rank_timeout_s: float = 60.0,
    hits: HitLog | None = None,
    profiled: bool | None = None,
) -> Session:
    """A session that watches the training loop in its `with` block.

        with perfdoctor.watch() as session:
            for batch in session.batches(loader):
                train_step(batch)
        print(session.diagnosis())

    After `warmup` steps (more while the loop compiles or its memory grows) come `active` bare steps, `active` with
    call-site hooks, `active` under a CUDA-only profile, and a few under a full one; then everything is taken back and
    the loop goes on unwatched. The loop is never stopped, and no wait for the device is added inside a measured step:
    the profiler waits when it starts and stops, between two phases.

    Under torchrun every rank that runs this watches itself. At the end of the block the others hand their recordings
    in, and `diagnosis()` on rank 0 speaks of all of them; elsewhere it speaks of its own rank.

    Args:
        warmup: steps before anything is measured.
        active: steps in each phase.
        every_n_steps: for a long run: a window like that every so many steps, and bare step times all through. The
            session is then a `LongSession`: `.windows`, `.outliers`, `.step_ns`.
        ranks: the ranks that record; all by default. The others run as if nobody watched.
        rank_timeout_s: how long rank 0 waits for the recordings of the others.
        hits: the log of an emulated device, in place of live hooks. Inside `emulate_cuda()` it need not be given.
        profiled: False leaves the profiled phases out; True asks for them without CUDA as well.
    """
    plan = Plan(warmup=warmup, active=active)
    if every_n_steps is None:
        session = Session(plan, hits=hits, profiled=profiled)
    else:
        from perfdoctor.doors.long_session import LongSession

        session = LongSession(plan, every_n_steps=every_n_steps, hits=hits, profiled=profiled)
    session.gathering = Gathering(ranks=ranks, timeout_s=rank_timeout_s)
    return session


def running() -> Session | None:
    """The session that watches this process's loop now, if there is one."""
    return _running


def recording_of(recorder: Recorder) -> Capture:
    """What was recorded, with a note where the device was emulated. Waits for the device."""
    capture = assemble(recorder)
    if not recorder.emulated:
        return capture
    return replace(capture, notes=(_LEFT_ALONE if recorder.leaves_device_alone else _EMULATED, *capture.notes))


class Session:
    """One watched loop. `capture` and `diagnosis()` are there once the `with` block is left, by whatever way."""

    def __init__(self, plan: Plan, *, hits: HitLog | None = None, profiled: bool | None = None) -> None:
        if plan.warmup < 1 or plan.active < 1:
            raise SessionError(f"a session needs at least one step in each phase, got {plan}: pass warmup=5, active=10")
        self.recorder = Recorder(plan, hits, profiled)
        self._capture: Capture | None = None
        self._live: LiveTrial | None = None
        self.gathering: Gathering | None = None  # with the other ranks, where they watch themselves too
        self.progress: ProgressLine | None = None
        self._entered = False
        self._recording = False  # from the start of the block on, unless other ranks were chosen to record

    def __enter__(self) -> Self:
        global _running
        with _lock:
            if self._entered:
                raise SessionError("this session has been used: call perfdoctor.watch() again for another")
            if _running is not None:
                raise SessionError(
                    "another perfdoctor session is running: leave its with block first; where that is "
                    "`perfdoctor run`, start a script that calls perfdoctor.watch() with python instead"
                )
            _running = self
            self._entered = True
        try:
            self._recording = self.gathering is None or self.gathering.begin()
            if self._recording:
                self.recorder.start()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._live is not None:
            self._live.note(error)  # says what the trial had on
        self._release()

    def tell(self, progress: ProgressLine) -> None:
        """Say on `progress` how far the phases are, between two steps: a look at the clock a step, a line a second."""
        self.progress = progress
        self.recorder.step_closed = lambda: progress.show(self._how_far)

    def _how_far(self) -> str:
        recorder = self.recorder
        stages = recorder.stages
        number = stages.index(recorder.stage) + 1 if recorder.stage in stages else len(stages)
        step, steps = len(recorder.rows) + 1, max(recorder.plan.total(stages), len(recorder.rows) + 1)
        return f"watching, {_PHASES[recorder.stage]} (phase {number} of {len(stages)}), step {step} of about {steps}"

    def _release(self) -> None:
        global _running
        try:
            if self._live is not None:
                self._live.close()
        finally:
            self._stop()

    def _stop(self) -> None:
        global _running
        try:
            self.recorder.stop()
        finally:
            with _lock:
                if _running is self:
                    _running = None
            if self.progress is not None:
                self.progress.close()
            if self.gathering is not None:
                self.gathering.hand_in(self.assembled)

    @property
    def done(self) -> bool:
        """Whether every phase is over. Until the block is left an idle optimizer hook stays, and nothing else."""
        return self.recorder.over

    def batches(self, loader: Iterable[T]) -> Batches[T]:
        """`loader`, with the wait for each batch timed. Takes from it exactly what the loop takes from this."""
        if not self._entered:
            raise SessionError("session.batches() belongs inside `with perfdoctor.watch() as session:`")
        if not isinstance(loader, GeneratorType):  # held, it would outlive the loop that breaks out of it
            self.recorder.batches.loader = loader
        return Batches(loader, self._next_of, self._goes_on)

    def _next_of(self, iterator: Iterator[T]) -> T:
        live = self._live
        fetch = live.next_of if live is not None and (live.running or live.over) else self._fetch
        batch: T = fetch(iterator)
        return batch

    def _fetch(self, iterator: Iterator[Any]) -> Any:
        return self.recorder.batches.next_of(iterator)

    def _goes_on(self) -> bool:
        """Whether a loader that has ended is to be begun again."""
        return self._live is not None and self._live.running

    def step(self) -> None:
        """Say that a step ends here: for loops whose updates no torch optimizer makes."""
        if _running is not self:
            raise SessionError("session.step() belongs inside `with perfdoctor.watch() as session:`")
        if self._recording:
            self.recorder.steps.mark()

    @property
    def capture(self) -> Capture:
        """The recording. Built on first use, after the loop.

        Raises:
            SessionError: the `with` block has not been left yet.
        """
        if not self._entered or _running is self:
            raise SessionError("the recording is ready after the `with` block of the session")
        return self.assembled()

    def assembled(self) -> Capture:
        """The recording once every phase is over. Waits for the device."""
        if self._capture is None:
            self._capture = recording_of(self.recorder)
        return self._capture

    def trial(self, *, steps: int = 100_000, seconds: float = 120.0, suspects: int = 6, model: Any = None) -> LiveTrial:
        """After the watched phases, try the running loop without each suspect: what does each really give back?

            with perfdoctor.watch() as session:
                trial = session.trial(model=model)
                for batch in session.batches(loader):
                    train_step(batch)
            print(trial.report())

        The loop over `session.batches(...)` ends by itself when the trial is over. Its steps are thrown away: what
        they changed in the parameters, the buffers of their models, the optimizers, learning-rate schedules,
        GradScalers and random states is put back; `model` names other models.

        Args:
            steps: at most so many steps after the watched ones.
            seconds: at most so long.
            suspects: at most so many findings are tried.
            model: the module (or modules) whose buffers are to be put back.

        Raises:
            SessionError: the `with` block is not running, or its phases are over.
        """
        from perfdoctor.doors.trial import LiveTrial
        from perfdoctor.trial.runner import Limits

        if _running is not self or self.done or self._live is not None:
            raise SessionError("session.trial() belongs at the start of `with perfdoctor.watch() as session:`, once")
        self._live = LiveTrial(self, Limits(steps=steps, seconds=seconds), suspects=suspects, models=model)
        return self._live

    def diagnosis(self) -> Report:
        """What the loop loses, where, and what would come back: `print` it, or look at its fields."""
        from perfdoctor.diagnose import diagnose
        from perfdoctor.report.page import Report

        if self._live is not None and self._live.measured and _running is not self:
            return Report.of(self._live.outcome().diagnosis)
        gathering = self.gathering
        if gathering is None:
            return Report.of(diagnose(self.capture), (self.capture,))
        diagnosis = gathering.diagnosis(self.capture)
        return Report.of(diagnosis, (self.capture, *gathering.captures))


class Batches(Generic[T]):
    """A loader seen through a session: iterate it, or call `next` on it by hand."""

    def __init__(
        self, loader: Iterable[T], fetch: Callable[[Iterator[T]], T], goes_on: Callable[[], bool] = lambda: False
    ) -> None:
        self._loader = loader
        self._fetch = fetch
        self._goes_on = goes_on
        self._iterator: Iterator[T] | None = None

    def __iter__(self) -> Iterator[T]:
        return Batches(self._loader, self._fetch, self._goes_on)._started()

    def __next__(self) -> T:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        return self._fetch(self._iterator)

    def __len__(self) -> int:
        """That of the loader; TypeError where it has none, as from the loader itself."""
        return len(self._loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def _started(self) -> Iterator[T]:
        fetch = self._fetch
        iterator = iter(self._loader)
        fetched = False
        while True:
            try:
                batch = fetch(iterator)
            except StopIteration:
                if not (fetched and self._goes_on()):
                    return
                iterator, fetched = iter(self._loader), False
                continue
            fetched = True
            yield batch
