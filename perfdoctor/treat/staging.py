"""Host memory copied into pinned memory by threads, off the thread that launches.

The threads make no CUDA call: one made during another thread's graph capture would break that capture. They copy plain
bytes with the GIL released (torch's own `copy_` would start an OpenMP team inside each of them, and takes one core
where OMP_NUM_THREADS=1 is set, as torchrun does). One core copies about 10 GB/s: a batch is cut between several.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch

from perfdoctor.watch.surroundings import usable_cpus

_PART_BYTES = 1 << 20  # smaller parts cost more in hand-over than they gain
_INLINE_BYTES = 256 << 10  # copied in 25 us; waking a thread and waiting for it takes longer
_MOST_THREADS = 4

Copy = tuple[torch.Tensor, torch.Tensor]  # to, from: same shape and dtype


class StagingJob:
    """The copies of one batch."""

    def __init__(self, num_parts: int) -> None:
        self._left = num_parts
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._error: BaseException | None = None
        if not num_parts:
            self._over.set()

    @property
    def done(self) -> bool:
        """Whether all bytes are there."""
        return self._over.is_set() and self._error is None

    def wait(self) -> None:
        """Return when all bytes are there.

        Raises:
            Exception: what went wrong in a thread.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Return when no thread touches the memory any more, however the copies went."""
        self._over.wait()

    def end_part(self, error: BaseException | None) -> None:
        """One part is over."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if not self._left:
                self._over.set()


class Stager:
    """A few threads that copy, started by the first batch that is worth it and joined by `close`."""

    def __init__(self) -> None:
        self._parts: SimpleQueue[tuple[StagingJob, Copy, int, int] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, copies: Sequence[Copy]) -> StagingJob:
        """Begin to copy; small batches are copied before this returns. The sources are held until they are read."""
        if sum(source.nbytes for _, source in copies) <= _INLINE_BYTES:
            for pair in copies:
                _copy_part(pair, 0, pair[1].nbytes)
            return StagingJob(0)
        self._wake()
        parts = [(pair, start, stop) for pair in copies for start, stop in _cut(pair, len(self._threads))]
        job = StagingJob(len(parts))
        for pair, start, stop in parts:
            self._parts.put((job, pair, start, stop))
        return job

    def close(self) -> None:
        """Let the threads finish what was begun, and join them."""
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _wake(self) -> None:
        while len(self._threads) < num_threads():
            thread = threading.Thread(target=_work, args=(self._parts,), name="perfdoctor-staging", daemon=True)
            thread.start()
            self._threads.append(thread)


def num_threads() -> int:
    """How many threads copy: half of the cores that this process may use, 1 to 4."""
    return max(1, min(_MOST_THREADS, int(usable_cpus()) // 2))


def _work(parts: SimpleQueue[Any]) -> None:
    while (part := parts.get()) is not None:
        job, pair, start, stop = part
        error: BaseException | None = None
        try:
            _copy_part(pair, start, stop)
        except BaseException as caught:  # the job must end, or the loop would wait for ever
            error = caught
        del part, pair  # a thread that waits for work holds no batch
        job.end_part(error)
        del job


def _cut(pair: Copy, num_parts: int) -> list[tuple[int, int]]:
    """Byte ranges that together are the tensor; one where the two differ in layout."""
    num_bytes = pair[1].nbytes
    size = max(_PART_BYTES, -(-num_bytes // num_parts) + 63 & ~63)
    if not _same_bytes(pair):
        size = max(1, num_bytes)
    return [(start, min(start + size, num_bytes)) for start in range(0, num_bytes, size)]


def _same_bytes(pair: Copy) -> bool:
    to, source = pair
    return to.stride() == source.stride() and not source.is_conj() and not source.is_neg()


def _copy_part(pair: Copy, start: int, stop: int) -> None:
    to, source = pair
    if _same_bytes(pair):
        ctypes.memmove(to.data_ptr() + start, source.data_ptr() + start, stop - start)
    else:
        with torch.no_grad():
            to.copy_(source)
