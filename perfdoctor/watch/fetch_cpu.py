"""How much of a fetch is computed, and how much of it waits for files or a network: noted as the loop fetches.

A loader whose samples wait gains from more workers than there are CPUs. Nothing is fetched for this. Time spent ready
to run while others had the CPU counts as neither: Linux tells it (/proc/.../schedstat).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A worker whose queue is full is idle. None is where the loop waited for so much of the time since its last batch, with
# none ready; where most of its batches were, one that was not tells nothing.
_WAITED = 0.05
_BUSY = 0.5
_PROC = "/proc"


@dataclass(frozen=True, slots=True)
class _Reading:
    """Of a thread or process, in ns: the clock, the time on a CPU, the time ready without one."""

    now: int
    on_cpu: int
    ready: int


class FetchCpu:
    """Give it every fetch of the loop's. The first of a pass over a loader counts for nothing: it starts things."""

    def __init__(self) -> None:
        self._computed_ns = 0
        self._took_ns = 0
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators
        self._workers: dict[int, _Reading] = {}  # by process id, behind their loader's last batch
        self._num_waited = self._num_idle = 0  # times that workers were found with the loop waiting for them, and not

    @property
    def share(self) -> float | None:
        """Of the time that samples take, what is computed, 0 to 1; None where it is not known yet."""
        if not self._took_ns or self._num_waited < self._num_idle:
            return None
        return min(self._computed_ns / self._took_ns, 1.0)

    def fetched(self, iterator: Any, fetch: Callable[[], Any]) -> Any:
        """`fetch()`, noted: one batch of a DataLoader's iterator.

        Raises:
            StopIteration: as the fetch does.
        """
        workers = [each.pid for each in getattr(iterator, "_workers", ())]
        ready = bool(workers) and _is_ready(iterator)
        before = _of_this_thread()
        batch = fetch()
        after = _of_this_thread()
        first = iterator not in self._begun
        self._begun.add(iterator)
        if workers:
            self._note_workers(workers, waited_ns=0 if ready else after.now - before.now)
        elif not first:
            self._add(before, after)
        return batch

    def _note_workers(self, pids: list[int], waited_ns: int) -> None:
        for pid in pids:
            found, last = _of_process(pid), self._workers.pop(pid, None)
            if found is None:
                continue
            self._workers[pid] = found
            if last is None:
                continue
            if waited_ns >= _WAITED * (found.now - last.now) or _is_busy(last, found):
                self._num_waited += 1
                self._add(last, found)
            else:
                self._num_idle += 1

    def _add(self, before: _Reading, after: _Reading) -> None:
        self._computed_ns += after.on_cpu - before.on_cpu
        self._took_ns += max(after.now - before.now - (after.ready - before.ready), 1)


def _is_busy(before: _Reading, after: _Reading) -> bool:
    """Whether a worker computed for most of the time: it was not idle then, whatever lay ready. Handing a batch over
    takes as long as the next one, where what computes is Python (9 ms of a batch of 8 ms)."""
    return after.on_cpu - before.on_cpu > _BUSY * (after.now - before.now - (after.ready - before.ready))


def _is_ready(iterator: Any) -> bool:
    """Whether a worker has put a batch into the queue: handing it over takes time, too (3 ms beside a busy worker)."""
    early = getattr(iterator, "_task_info", {}).get(getattr(iterator, "_rcvd_idx", None), ())
    with suppress(AttributeError, OSError):
        return len(early) > 1 or not iterator._data_queue.empty()
    return False


def _of_this_thread() -> _Reading:
    """The CPU time is that of all threads: a decoder may have its own."""
    held = _schedstat("thread-self")
    return _Reading(time.perf_counter_ns(), time.process_time_ns(), held[1] if held else 0)


def _of_process(pid: int) -> _Reading | None:
    held = _schedstat(str(pid))
    return None if held is None else _Reading(time.perf_counter_ns(), *held)


def _schedstat(of: str) -> tuple[int, int] | None:
    """ns on a CPU and ns ready without one; None where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        on_cpu, ready = Path(os.path.join(_PROC, of, "schedstat")).read_text().split()[:2]
        return int(on_cpu), int(ready)
    return None
