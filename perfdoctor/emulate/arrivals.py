"""Copies to the host that may still be on their way: who reads the target before a wait reads garbage on CUDA.

While a copy is pending its target is an `ArrivingTensor`, a class set on the very object and taken back when an event
or a stream that comes after the copy has been waited for.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch

from perfdoctor.emulate import border

_lock = threading.Lock()
_clock = itertools.count(1)
_pending: list[tuple[int, weakref.ref[torch.Tensor]]] = []
# Asking about a tensor or taking a view of it reads no element.
_NO_READ = {
    "__get__", "__set__", "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "data_ptr",
    "is_pinned",
    "is_contiguous", "untyped_storage", "storage", "element_size", "__len__", "record_stream", "requires_grad_",
    "__hash__",
    "get_device", "is_floating_point", "is_complex", "__deepcopy__",
}  # fmt: skip
_VIEWS = {
    "view", "reshape", "detach", "squeeze", "unsqueeze", "flatten", "t", "transpose", "permute", "expand", "narrow",
    "select",
    "view_as", "unflatten", "movedim", "swapaxes", "unbind", "split", "chunk", "alias",
}  # fmt: skip


class ArrivingTensor(torch.Tensor):
    """A host tensor whose content is still being copied from the device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        read = name not in _NO_READ and name not in _VIEWS and not _overwrites(name, args)
        if read and _pending:
            border.cross("d2h_race")
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if name in _VIEWS:
            for view in out if isinstance(out, (tuple, list)) else (out,):
                start_copy(view)
        return out


def _overwrites(name: str, args: Any) -> bool:
    # x.copy_(...) on the target itself starts a new copy and reads nothing of the old one.
    return name in ("copy_", "zero_", "fill_") and bool(args) and isinstance(args[0], ArrivingTensor)


def tick() -> int:
    """A moment in the order of copies and events."""
    return next(_clock)


def start_copy(target: torch.Tensor) -> None:
    """Note that a copy into `target` is on its way."""
    if type(target) not in (torch.Tensor, ArrivingTensor):
        return
    with _lock:
        target.__class__ = ArrivingTensor
        _pending.append((tick(), weakref.ref(target)))


def arrive(before: int | None = None) -> None:
    """All copies issued before the moment `before` (None: all) have arrived."""
    if not _pending:
        return
    with _lock:
        late = [] if before is None else [entry for entry in _pending if entry[0] >= before]
        late_ids = {id(ref()) for _, ref in late}
        for moment, ref in _pending:
            target = ref()
            if target is not None and id(target) not in late_ids and (before is None or moment < before):
                target.__class__ = torch.Tensor
        _pending[:] = late


border.on_wait.append(arrive)
