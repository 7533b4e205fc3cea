"""The ring's slots: pinned host memory and device memory for one batch, and the two events that guard them.

"copied" is recorded on the side stream after a batch's copies: the consumer's stream waits for it. "free" is recorded
on the consumer's stream once nobody holds a batch any more: the next copy into its memory waits for it. Device memory
is allocated on the consumer's stream, so what the user keeps may be freed at any time without `record_stream`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from perfdoctor.errors import StaleBatchError, UsageError
from perfdoctor.watch.device_events import new_event

_POLL_S = 100e-6
Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # sizes, strides, dtype


@dataclass(slots=True)
class _Block:
    """Memory of the device, its present form, and how many references there are when only the ring holds it."""

    flat: torch.Tensor
    stream: Any  # on which it was allocated
    storage: Any
    spec: Spec
    view: torch.Tensor
    num_ours: tuple[int, int] = (0, 0)
    is_out: bool = False  # was handed out, and was not seen unreferenced since

    def take_form(self, spec: Spec) -> torch.Tensor:
        """The memory as a tensor of that form. Nobody else may hold it now."""
        if self.spec != spec:
            self.spec, self.view = spec, shaped(self.flat, spec)
        self.num_ours = self.references()
        return self.view

    def references(self) -> tuple[int, int]:
        """How often the memory is held, by tensors (views and what autograd saved included) and as a storage object."""
        use_count: Any = torch._C._storage_Use_Count  # type: ignore[attr-defined]
        return use_count(self.storage._cdata), sys.getrefcount(self.storage)

    @property
    def is_held(self) -> bool:
        """Whether somebody else than the ring holds it."""
        tensors, storages = self.references()
        return tensors > self.num_ours[0] or storages > self.num_ours[1]


class HostBuffer:
    """Pinned memory for one tensor of a batch; grows, never shrinks."""

    def __init__(self) -> None:
        self._flat: torch.Tensor | None = None
        self._view: tuple[Spec, torch.Tensor] | None = None

    def view(self, spec: Spec) -> torch.Tensor:
        """A pinned tensor of that form."""
        if self._view is None or self._view[0] != spec:
            num_bytes = spec_bytes(spec)
            if self._flat is None or self._flat.nbytes < num_bytes:
                self._view = self._flat = None
                self._flat = _empty(num_bytes, torch.device("cpu"), pinned=True)
            self._view = (spec, shaped(self._flat, spec))
        return self._view[1]


class DeviceBuffer:
    """Device memory for one tensor of a batch.

    With fixed addresses each form keeps memory of its own; otherwise all forms share one block that grows, and a
    block that is still held when it is to be filled goes to its holder.
    """

    def __init__(self, device: torch.device, fixed: bool) -> None:
        self._device = device
        self._fixed = fixed
        self._blocks: dict[Spec | None, _Block] = {}
        self._filled: _Block | None = None

    def sweep(self) -> bool:
        """Whether a batch that was handed out turns out not to be held any more."""
        freed = False
        for block in self._blocks.values():
            if block.is_out and not block.is_held:
                block.is_out, freed = False, True
        return freed

    def is_stale(self, spec: Spec) -> bool:
        """Whether filling it with a tensor of that form would overwrite one that is still held."""
        block = self._blocks.get(spec if self._fixed else None)
        return block is not None and block.is_out

    def claim(self, spec: Spec, stream: Any) -> tuple[torch.Tensor, _Block | None, bool]:
        """The tensor to copy into, the block that it no longer uses, and whether memory was allocated for it."""
        key = spec if self._fixed else None
        block = self._blocks.get(key)
        if block is not None and not block.is_out and block.flat.nbytes >= spec_bytes(spec):
            self._filled = block
            return block.take_form(spec), None, False
        fresh = _allocated(spec, 0 if block is None else block.flat.nbytes, self._device, stream)
        self._blocks[key] = self._filled = fresh
        return fresh.view, block, True

    def hand_out(self) -> torch.Tensor:
        """The filled tensor: an alias, so that what the user sets on it (`requires_grad`, `.data`) stays with it."""
        assert self._filled is not None
        self._filled.is_out = True
        return self._filled.view.detach()

    def blocks(self) -> list[_Block]:
        """All memory that it holds."""
        return list(self._blocks.values())


class Slot:
    """Host and device memory of one batch in the ring."""

    def __init__(self, device: torch.device, fixed: bool, side: Any) -> None:
        self._device = device
        self._fixed = fixed
        self._side = side  # the stream that copies
        self._freed_on: Any = None  # the stream that `free` was recorded on
        self.host: list[HostBuffer] = []
        self.on_device: list[DeviceBuffer] = []
        self.copied = new_event()
        self.free = new_event()
        self.sources: Sequence[torch.Tensor] = ()  # held until `copied` is over

    def widen(self, num_tensors: int) -> None:
        """Have buffers for that many tensors."""
        while len(self.host) < num_tensors:
            self.host.append(HostBuffer())
            self.on_device.append(DeviceBuffer(self._device, self._fixed))

    @property
    def is_read(self) -> bool:
        """Whether the last copy out of its host memory is over. Never waits."""
        if not self.copied.query():  # type: ignore[no-untyped-call]
            return False
        self.sources = ()
        return True

    def wait_read(self) -> None:
        """Return when the last copy out of its host memory is over: the host is a whole ring ahead of the device."""
        while not self.is_read:
            time.sleep(_POLL_S)

    def sweep(self, stream: Any) -> None:
        """Record "free" where the batch that was handed out is not held any more.

        What the user launched with it was launched before now, whenever that was: an event of an earlier moment would
        not cover a batch that was kept for some steps and used again.
        """
        freed = [buffer.sweep() for buffer in self.on_device]  # all of them, not up to the first
        if any(freed):
            self._record_free(stream)

    def is_stale(self, specs: Sequence[Spec]) -> bool:
        """Whether a tensor that would be overwritten is still held."""
        return any(buffer.is_stale(spec) for buffer, spec in zip(self.on_device, specs, strict=False))

    def copy(self, sources: Sequence[torch.Tensor], specs: Sequence[Spec], stream: Any) -> None:
        """Copy `sources` (pinned) to the device on the side stream, once the memory is free on `stream`.

        Raises:
            StaleBatchError: with fixed addresses, the batch before is still held.
        """
        if self._fixed and self.is_stale(specs):
            raise StaleBatchError(_STALE)
        targets = []
        for buffer, spec in zip(self.on_device, specs, strict=False):
            target, old, is_new = buffer.claim(spec, stream)
            if old is not None:
                self._return(old)
            if is_new:  # the allocator gives memory whose last use may still be queued on this stream
                self._record_free(stream)
            targets.append(target)
        self.sources = sources
        self._side.wait_event(self.free)
        with torch.cuda.stream(self._side), torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            self.copied.record(self._side)

    def hand_out(self, num_tensors: int, stream: Any) -> list[torch.Tensor]:
        """The device tensors, for work on `stream`."""
        stream.wait_event(self.copied)
        return [buffer.hand_out() for buffer in self.on_device[:num_tensors]]

    def settle(self) -> None:
        """Order the copies before all later work on the streams that own the memory, and let go of what was read."""
        with contextlib.suppress(RuntimeError):  # a device that has failed says so in the user's own next call
            for buffer in self.on_device:
                for block in buffer.blocks():
                    block.stream.wait_event(self.copied)
            _ = self.is_read

    def release(self) -> None:
        """Give all memory back once the copies are over."""
        # Where the device has failed there is nothing to wait for, and the error that says so is on its way already.
        with contextlib.suppress(RuntimeError):
            self.wait_read()
            for buffer in self.on_device:
                for block in buffer.blocks():
                    self._return(block)
        self.host, self.on_device, self.sources = [], [], ()

    def _record_free(self, stream: Any) -> None:
        if self._freed_on is not None and self._freed_on != stream:  # recording again forgets the other stream's work
            self._side.wait_event(self.free)
        self.free.record(stream)
        self._freed_on = stream

    def _return(self, block: _Block) -> None:
        # Memory goes back to the stream that it was allocated on: nothing there may touch it before copy and user did.
        block.stream.wait_event(self.copied)
        block.stream.wait_event(self.free)


_STALE = (
    "DevicePrefetcher(stable_addresses=True): a batch is still referenced, and its memory is to be filled with a new "
    "one now: the tensors that you keep would change. Drop it (a list, a closure, an attribute or a loss with its "
    "graph may hold it or a view of it), keep a .clone(), raise depth=, or use stable_addresses=False."
)


def spec_of(tensor: torch.Tensor) -> Spec:
    """The form that `tensor.to(device)` gives: dense, in the same order of dimensions."""
    if tensor.is_contiguous():
        return tuple(tensor.shape), tensor.stride(), tensor.dtype
    like = torch.empty_like(tensor, device="meta")
    return tuple(like.shape), tuple(like.stride()), tensor.dtype


def spec_bytes(spec: Spec) -> int:
    """How many bytes a tensor of that form fills; it is dense."""
    num_bytes = spec[2].itemsize
    for size in spec[0]:
        num_bytes *= size
    return num_bytes


def shaped(flat: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A tensor of that form over the first bytes of `flat`."""
    with torch.inference_mode(False), torch.no_grad():
        return flat[: spec_bytes(spec)].view(spec[2]).as_strided(spec[0], spec[1])


def require_reference_counts() -> None:
    """Say so where torch cannot tell how many tensors share a piece of memory."""
    if not hasattr(torch._C, "_storage_Use_Count"):
        raise UsageError(
            f"DevicePrefetcher: torch {torch.__version__} counts no references to memory; use a CUDA build"
        )


def _empty(num_bytes: int, device: torch.device, *, pinned: bool) -> torch.Tensor:
    # Never an inference tensor, even where the loop runs in inference mode: it will be written outside too.
    with torch.inference_mode(False):
        return torch.empty(_rounded(num_bytes), dtype=torch.uint8, device=device, pin_memory=pinned)


def _allocated(spec: Spec, num_bytes: int, device: torch.device, stream: Any) -> _Block:
    flat = _empty(max(num_bytes, spec_bytes(spec)), device, pinned=False)
    block = _Block(flat=flat, stream=stream, storage=flat.untyped_storage(), spec=spec, view=shaped(flat, spec))
    block.take_form(spec)
    return block


def _rounded(num_bytes: int) -> int:
    """Up to an eighth more, so that batches of many lengths soon fit into what is there."""
    step = max(512, 1 << max(0, num_bytes.bit_length() - 4))
    return max(step, -(-num_bytes // step) * step)
