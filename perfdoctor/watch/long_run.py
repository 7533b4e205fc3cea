"""A whole run on a cheap clock: how long every step takes, and what happened in those that take far longer.

One stamp a step (host time, and on a GPU an event from a ring, read only once it is complete: nothing waits), and hooks
on what is rare: checkpoints, evaluations, new epochs, recompilations, garbage collections. No hook on what is not.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfdoctor.watch.clocks import cuda_active
from perfdoctor.watch.device_events import new_event
from perfdoctor.watch.happenings import Happenings
from perfdoctor.watch.outliers import Outlier, find_outliers
from perfdoctor.watch.steps import StepDetector

# Events are read in batches: asking one whether it is complete costs about as much as recording one.
_READ_EVERY = 32
# A host that runs ahead further than this is timed by its own clock: the ring must not grow without end.
_MOST_EVENTS = 1024


# The end of a step: host ns, and the event recorded there (None without a GPU). A named tuple takes 0.2 us to make.
Mark = tuple[int, Any]


class StepClock:
    """The duration of every step. `stamp` and `ended` together cost under 2 us a step of host time.

    Durations are between the device's ends of two steps where both were recorded, else between the host's.
    """

    def __init__(self) -> None:
        self._ends = array("q")  # host ns at the end of each step
        self._device = array("q")  # ns between the ends of step i - 1 and i on the device; -1 where not known
        self._pending: deque[tuple[int, Any]] = deque()  # (step, event), oldest first; the first one's end is known
        self._free: list[Any] = []
        self._num_events = 0

    @property
    def num_steps(self) -> int:
        """Steps that have ended."""
        return len(self._ends)

    @property
    def end_ns(self) -> NDArray[np.int64]:
        """Host time (Unix ns) of the end of each step. Shape (num_steps,)."""
        return np.array(self._ends, np.int64)

    def stamp(self) -> Mark:
        """Now. An event that `ended` does not take is recorded again by the next stamp."""
        if not cuda_active():
            return time.time_ns(), None
        if not self._free and self._num_events < _MOST_EVENTS:
            self._num_events += 1
            self._free.append(new_event(timed=True))
        if not self._free:
            return time.time_ns(), None
        event = self._free[-1]
        event.record()
        return time.time_ns(), event

    def ended(self, mark: Mark) -> None:
        """A step has ended at `mark`."""
        now_ns, event = mark
        step = len(self._ends)
        self._ends.append(now_ns)
        self._device.append(-1)
        if event is not None:
            self._free.pop()
            self._pending.append((step, event))
        if not step % _READ_EVERY:
            self._read()

    def durations(self) -> NDArray[np.int64]:
        """ns of each step but the first, whose start nobody saw. Shape (num_steps - 1,). Reads what is complete."""
        self._read()
        host = np.diff(self.end_ns)
        device = np.array(self._device, np.int64)[1:]
        return np.where(device >= 0, device, host)

    def _read(self) -> None:
        pending = self._pending
        try:
            while len(pending) > 1 and pending[1][1].query():
                (before, first), (step, event) = pending[0], pending[1]
                if step == before + 1:
                    self._device[step] = int(first.elapsed_time(event) * 1e6)
                self._free.insert(0, first)  # never on top: that may be recorded for the step that is ending
                pending.popleft()
        except RuntimeError:  # a CUDA error of the loop comes out here again: the host's times stand in
            pending.clear()


class LongClock:
    """The clock, the step detector that drives it and the hooks on rare things, installed and removed together.

    `install` and `remove` belong outside optimizer hooks. `watched` marks the steps that a window recorded: they are
    slower, and no outliers.
    """

    def __init__(self) -> None:
        self.clock = StepClock()
        self.happenings = Happenings()
        self.steps = StepDetector(self.clock.stamp, self._ended)
        self.window_open = False
        self._watched = array("b")

    def install(self) -> None:
        """Begin."""
        self.happenings.install(self.steps.requested)
        self.steps.install()

    def remove(self) -> None:
        """Take every hook back."""
        try:
            self.steps.remove()
        finally:
            self.happenings.remove()

    def next_of(self, iterator: Iterator[Any], fetch: Callable[[Iterator[Any]], Any]) -> Any:
        """The next batch, by `fetch(iterator)`; the wait for it is noted."""
        return self.happenings.batches.next_of(_Fetched(iterator, fetch))

    def _ended(self, mark: Mark) -> None:
        self.clock.ended(mark)
        self.happenings.step_ended(mark[0])
        self._watched.append(self.window_open)

    @property
    def watched(self) -> NDArray[np.bool_]:
        """True for each step of which a part was recorded by a window, or that follows one. Shape (num_steps,)."""
        flags = np.array(self._watched, bool)
        return flags | np.concatenate(([False], flags[:-1])) if len(flags) else flags

    def outliers(self, warmup: int = 5) -> tuple[Outlier, ...]:
        """The steps after `warmup` that take far longer than the median, each with its bills."""
        return find_outliers(
            durations=self.clock.durations(),
            end_ns=self.clock.end_ns,
            data_ns=self.happenings.data_ns,
            rows=self.happenings.rows,
            watched=self.watched,
            warmup=warmup,
        )


class _Fetched:
    """An iterator whose next item comes by another way."""

    def __init__(self, iterator: Iterator[Any], fetch: Callable[[Iterator[Any]], Any]) -> None:
        self._iterator = iterator
        self._fetch = fetch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._fetch(self._iterator)
