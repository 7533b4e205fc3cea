"""`DevicePrefetcher`: the next batches are copied to the device while the step works on this one.

    for images, labels in perfdoctor.DevicePrefetcher(loader, "cuda"):
        train_step(images, labels)

The thread that iterates fetches from the loader and makes every CUDA call; threads copy unpinned memory into a ring of
pinned slots; one side stream copies from there. Two events a slot keep the order on the device (`batch_slots`).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from perfdoctor.errors import UsageError
from perfdoctor.treat.batch_slots import Slot, Spec, require_reference_counts, spec_of
from perfdoctor.treat.batch_tree import Skeleton, take_apart
from perfdoctor.treat.devices import named_device, numbered_device
from perfdoctor.treat.staging import Stager, StagingJob

_LOADER_STATE = ("state_dict", "load_state_dict")
_MOST_AHEAD = 1000  # each has a slot with memory and events of its own


@dataclass(slots=True)
class _Fetched:
    """A batch between the loader and the user; or, at the end, what the loader raised."""

    skeleton: Skeleton | None = None
    slot: Slot | None = None
    sources: Sequence[torch.Tensor] = ()  # pinned, in the order of the places
    specs: Sequence[Spec] = ()
    staging: StagingJob = field(default_factory=lambda: StagingJob(0))
    is_issued: bool = False
    state: Any = None  # of the loader, after this batch
    error: Exception | None = None


class DevicePrefetcher:
    """An iterable of the loader's batches with their tensors on `device`, values and order as they were.

    Batches may nest: tuples, named tuples, lists, dicts and other mappings, dataclasses, packed sequences. Tensors on
    `device` already and what is no tensor pass through; other objects with a `.to` are moved by it. Attributes and
    methods of the loader (`set_epoch`, `sampler`, `dataset`, ...) are reached through the prefetcher. `state_dict()`,
    where the loader has one, is the state after the last batch that was handed out, not the last one fetched.

    depth: so many batches are fetched and staged ahead. The ring has `depth + 2` slots of pinned and of device memory.
    stable_addresses: the same addresses come round (for CUDA graphs), each shape at its own. A batch may be kept for
    `depth` steps after its own; one that is still referenced when its slot is to be filled, by a view or by autograd
    too, raises StaleBatchError. Without it such a batch keeps its memory, stays correct, and the slot gets new memory.

    No step waits for the device, with one exception: a host that has run a whole ring ahead of the device waits for a
    slot, as it would wait for a place in the launch queue. What is not seen: work with a batch on other streams than
    the one that is current when the next batch is asked for (order it yourself, as with any tensor), and a loader that
    writes again into *pinned* memory that it handed out (as with `.to(non_blocking=True)`; unpinned memory is read
    before the loader is asked again). An in-process loader draws from torch's CPU generator up to `depth` batches
    before the step that uses them. Objects with a `.to` of their own block in it unless the loader pins their memory.

    Without CUDA the loader's batches pass through unchanged. Raises UsageError: depth below 1 or above 1000, a
    loader that cannot be iterated, a device that is no CUDA device of this machine.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | int = "cuda",
        depth: int = 2,
        stable_addresses: bool = False,
    ) -> None:
        _require_iterable(loader)
        if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= _MOST_AHEAD:
            raise UsageError(
                f"DevicePrefetcher(depth={depth!r}): expected a whole number of batches, 1 to {_MOST_AHEAD}"
            )
        if not isinstance(stable_addresses, bool):
            raise UsageError(f"DevicePrefetcher(stable_addresses={stable_addresses!r}): expected True or False")
        self.loader = loader
        self.depth = depth
        self.stable_addresses = stable_addresses
        self.device, self._is_passing = _checked_device(device)
        self._idle: list[_Ring] = []
        self._left: _Pipeline | None = None
        self._side: Any = None  # the one side stream, made when there is something to copy
        self._state: Any = None
        self._has_state = False

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        self._has_state = False
        return batches if self._is_passing else self._run(batches)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # Only what this class lacks comes here. A loader without state must look like one.
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        found = getattr(self.loader, name)
        if name in _LOADER_STATE and not self._is_passing:
            return self._state_dict if name == "state_dict" else self._load_state_dict
        return found

    def __getstate__(self) -> dict[str, Any]:
        # A copy, and what a process gets, has the same settings and makes a ring and a stream of its own.
        return {**self.__dict__, "_idle": [], "_left": None, "_side": None}

    def close(self) -> None:
        """Give the ring's memory back; it is made anew when the prefetcher is iterated again."""
        if self._left is not None:  # what was fetched from an iterator and not handed out is lost
            self._idle.append(self._left.ring)
            self._left = None
        while self._idle:
            self._idle.pop().release()

    def _run(self, batches: Iterator[Any]) -> Iterator[Any]:
        pipeline = self._taken_up(batches)
        is_kept, failed = False, True
        try:
            while (fetched := pipeline.next()) is not None:
                self._note(fetched.state)
                # No local names the batch while the user has it: the ring counts references.
                yield pipeline.hand_out(fetched)
            self._note(pipeline.state)
            failed = False
        except GeneratorExit:  # the user left the loop; a loop over an iterator may go on from there
            failed, is_kept = False, batches is self.loader
            raise
        finally:
            pipeline.pause()
            if failed:
                pipeline.ring.release()
            elif is_kept:
                self._left = pipeline
            else:
                self._idle.append(pipeline.ring)

    def _taken_up(self, batches: Iterator[Any]) -> _Pipeline:
        """A new pass; over an iterator that a loop has left, the same pass with what was fetched already."""
        left, self._left = self._left, None
        if left is not None and batches is self.loader:
            return left
        pipeline = _Pipeline(self.loader, batches, self._idle.pop() if self._idle else self._new_ring())
        self._note(pipeline.state)
        return pipeline

    def _new_ring(self) -> _Ring:
        require_reference_counts()
        if self._side is None:
            self._side = torch.cuda.Stream(device=self.device)  # type: ignore[no-untyped-call]
        num_slots = self.depth + 2
        slots = tuple(Slot(self.device, self.stable_addresses, self._side) for _ in range(num_slots))
        return _Ring(device=self.device, depth=self.depth, fixed=self.stable_addresses, slots=slots)

    def _note(self, state: Any) -> None:
        self._state, self._has_state = state, True

    def _state_dict(self) -> Any:
        return copy.deepcopy(self._state) if self._has_state else self.loader.state_dict()  # type: ignore[attr-defined]

    def _load_state_dict(self, state: Any) -> Any:
        self._has_state = False
        return self.loader.load_state_dict(state)  # type: ignore[attr-defined]


@dataclass(slots=True, kw_only=True)
class _Ring:
    """Slots in use in turn, over the ends of epochs too: the last batch of one may be held while the next begins."""

    device: torch.device
    depth: int
    fixed: bool
    slots: tuple[Slot, ...]
    num_handed_out: int = 0

    def slot(self, number: int) -> Slot:
        """The slot of the batch with that number."""
        return self.slots[number % len(self.slots)]

    def release(self) -> None:
        """Give all memory back."""
        for slot in self.slots:
            slot.release()


class _Pipeline:
    """One pass over the loader: fetched, staged, copied, handed out."""

    def __init__(self, loader: Any, batches: Iterator[Any], ring: _Ring) -> None:
        self._loader = loader
        self._batches = batches
        self.ring = ring
        self._queue: deque[_Fetched] = deque()
        self._num_fetched = ring.num_handed_out  # what a loop before fetched and did not want is overwritten
        self._is_over = False
        self._stager = Stager()
        self.state = self._snapshot()  # of the loader, after its last fetch

    def next(self) -> _Fetched | None:
        """The next batch, on its way to the device, with more of them behind it; None at the end.

        Raises:
            Exception: what the loader raised in the place of this batch.
        """
        stream = self._stream()
        for slot in self.ring.slots:
            slot.sweep(stream)
        if not self._queue:
            self._fetch()
        first = self._queue.popleft()
        if isinstance(first.error, StopIteration):
            return None
        if first.error is not None:
            try:
                raise first.error
            finally:
                first.error = None  # this frame is in its traceback: a ring of references would hold the memory
        self._issue(first, stream)
        self._look_ahead(stream)
        return first

    def hand_out(self, fetched: _Fetched) -> Any:
        """The batch, for work on the current stream."""
        assert fetched.slot is not None
        assert fetched.skeleton is not None
        tensors = fetched.slot.hand_out(len(fetched.specs), self._stream())
        self.ring.num_handed_out += 1
        fetched.sources = ()
        return fetched.skeleton.filled(tensors, self.ring.device)

    def pause(self) -> None:
        """Leave no thread, and no copy that memory given back could run into."""
        self._stager.close()
        for slot in self.ring.slots:
            slot.settle()

    def _stream(self) -> Any:
        return torch.cuda.current_stream(self.ring.device)

    def _look_ahead(self, stream: Any) -> None:
        # The copy of the next batch first: the loader may take its time. Then once more, if there was no next batch.
        self._issue_next(stream)
        while len(self._queue) < self.ring.depth and not self._is_over and self.ring.slot(self._num_fetched).is_read:
            self._fetch()
        self._issue_next(stream)

    def _issue_next(self, stream: Any) -> None:
        if not self._queue or self._queue[0].slot is None or not self._queue[0].staging.done:
            return
        following = self._queue[0]
        assert following.slot is not None
        # At a fixed address the batch before may be held until its memory is really needed.
        if not (self.ring.fixed and following.slot.is_stale(following.specs)):
            self._issue(following, stream)

    def _issue(self, fetched: _Fetched, stream: Any) -> None:
        if fetched.is_issued or fetched.slot is None:
            return
        fetched.staging.wait()
        fetched.slot.copy(fetched.sources, fetched.specs, stream)
        fetched.is_issued = True

    def _fetch(self) -> None:
        """Ask the loader for a batch and begin to stage it. What is raised takes the place of the batch."""
        slot = self.ring.slot(self._num_fetched)
        slot.wait_read()
        # A loader may fill the same unpinned memory again: what it handed out is read first.
        for fetched in self._queue:
            fetched.staging.settle()
        try:
            self._queue.append(self._staged(next(self._batches), slot))
            self._num_fetched += 1
        except Exception as error:
            self._is_over = True
            self._queue.append(_Fetched(error=error.with_traceback(_outside(error.__traceback__))))
            if isinstance(error, StopIteration):
                self.state = self._snapshot()

    def _staged(self, batch: Any, slot: Slot) -> _Fetched:
        skeleton, tensors = take_apart(batch, self.ring.device)
        slot.widen(len(tensors))
        specs = [spec_of(tensor) for tensor in tensors]
        sources, copies = [], []
        for tensor, spec, host in zip(tensors, specs, slot.host, strict=False):
            if _is_copied_directly(tensor, spec):
                sources.append(tensor)
            else:
                sources.append(host.view(spec))
                copies.append((sources[-1], tensor))
        self.state = self._snapshot()
        staging = self._stager.start(copies)
        return _Fetched(
            skeleton=skeleton, slot=slot, sources=sources, specs=specs, staging=staging, state=self.state,
        )  # fmt: skip

    def _snapshot(self) -> Any:
        # Some loaders hand out the dict that they go on writing to.
        return copy.deepcopy(self._loader.state_dict()) if hasattr(self._loader, "state_dict") else None


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file, which hold the queue that the exception waits in."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _is_copied_directly(tensor: torch.Tensor, spec: Spec) -> bool:
    # With other strides `copy_` would make a dense copy on the device first, an allocation a step.
    return tensor.stride() == spec[1] and not tensor.is_conj() and not tensor.is_neg() and tensor.is_pinned()


def _require_iterable(loader: Any) -> None:
    if isinstance(loader, (str, bytes, torch.Tensor, type)) or not hasattr(loader, "__iter__"):
        raise UsageError(
            f"DevicePrefetcher: expected an iterable of batches (a DataLoader, a list, a generator); "
            f"got {type(loader).__name__}"
        )


def _checked_device(device: Any) -> tuple[torch.device, bool]:
    """The device with its index, and whether there is no CUDA here, so that batches pass through."""
    named = named_device(device, "DevicePrefetcher")
    has_cuda = torch.cuda.is_available()
    if named.type == "cpu" and not has_cuda:
        return named, True
    if named.type != "cuda":
        raise UsageError(f"DevicePrefetcher(device={device!r}): expected a CUDA device ('cuda', 'cuda:1')")
    return (numbered_device(named, "DevicePrefetcher"), False) if has_cuda else (named, True)
