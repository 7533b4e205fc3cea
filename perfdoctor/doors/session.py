"""The context manager: `with perfdoctor.watch() as session`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType, TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from perfdoctor.errors import SessionError
from perfdoctor.record.call_site import HitLog
from perfdoctor.record.capture import Capture
from perfdoctor.watch.assembly import assemble
from perfdoctor.watch.plan import Plan
from perfdoctor.watch.recorder import Recorder

if TYPE_CHECKING:
    from perfdoctor.report.page import Report

T = TypeVar("T")

_running: Session | None = None
_lock = threading.Lock()


def watch(*, warmup: int = 5, active: int = 10, hits: HitLog | None = None, profiled: bool | None = None) -> Session:
    """A session that watches the training loop in its `with` block.

        with perfdoctor.watch() as session:
            for batch in session.batches(loader):
                train_step(batch)
        print(session.diagnosis())

    After `warmup` steps (more while the loop compiles or its memory grows) come `active` bare steps, `active` with
    call-site hooks, `active` under a CUDA-only profile, and a few under a full one; then everything is taken back and
    the loop goes on unwatched. The loop is never stopped, and no wait for the device is added inside a measured step:
    the profiler waits when it starts and stops, between two phases.

    Args:
        warmup: steps before anything is measured.
        active: steps in each phase.
        hits: the log of an emulated device, in place of live hooks. Inside `emulate_cuda()` it need not be given.
        profiled: False leaves the profiled phases out; True asks for them without CUDA as well.
    """
    return Session(Plan(warmup=warmup, active=active), hits=hits, profiled=profiled)


class Session:
    """One watched loop. `capture` and `diagnosis()` are there once the `with` block is left, by whatever way."""

    def __init__(self, plan: Plan, *, hits: HitLog | None = None, profiled: bool | None = None) -> None:
        if plan.warmup < 1 or plan.active < 1:
            raise SessionError(f"a session needs at least one step in each phase, got {plan}: pass warmup=5, active=10")
        self.recorder = Recorder(plan, hits, profiled)
        self._capture: Capture | None = None
        self._entered = False

    def __enter__(self) -> Self:
        global _running
        with _lock:
            if self._entered:
                raise SessionError("this session has been used: call perfdoctor.watch() again for another")
            if _running is not None:
                raise SessionError("another perfdoctor session is running: leave its with block first")
            _running = self
            self._entered = True
        try:
            self.recorder.start()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        global _running
        try:
            self.recorder.stop()
        finally:
            with _lock:
                if _running is self:
                    _running = None

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
        return Batches(loader, self.recorder.batches.next_of)

    def step(self) -> None:
        """Say that a step ends here: for loops whose updates no torch optimizer makes."""
        if _running is not self:
            raise SessionError("session.step() belongs inside `with perfdoctor.watch() as session:`")
        self.recorder.steps.mark()

    @property
    def capture(self) -> Capture:
        """The recording. Built on first use, after the loop.

        Raises:
            SessionError: the `with` block has not been left yet.
        """
        if not self._entered or _running is self:
            raise SessionError("the recording is ready after the `with` block of the session")
        if self._capture is None:
            self._capture = assemble(self.recorder)
        return self._capture

    def diagnosis(self) -> Report:
        """What the loop loses, where, and what would come back: `print` it, or look at its fields."""
        from perfdoctor.diagnose import diagnose
        from perfdoctor.report.page import Report

        return Report.of(diagnose(self.capture))


class Batches(Generic[T]):
    """A loader seen through a session: iterate it, or call `next` on it by hand."""

    def __init__(self, loader: Iterable[T], fetch: Callable[[Iterator[T]], T]) -> None:
        self._loader = loader
        self._fetch = fetch
        self._iterator: Iterator[T] | None = None

    def __iter__(self) -> Iterator[T]:
        return Batches(self._loader, self._fetch)._started()

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
        while True:
            try:
                batch = fetch(iterator)
            except StopIteration:
                return
            yield batch
