"""Copies that torch reports nowhere: `non_blocking=True` from pageable memory, and reads of a copy still on its way.

`Tensor.to`, `.cuda` and `.copy_` become Python functions while installed: 0.2 us a call, and nothing for
torch.compile, which handles tensor methods by name. The reading methods are replaced only once an asynchronous
copy to the host has been seen.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from perfdoctor.record.call_site import HitLog
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.tensor_method import TensorMethod

_READS = (
    "item",
    "tolist",
    "numpy",
    "__float__",
    "__int__",
    "__index__",
    "__bool__",
    "__format__",
    "__array__",
    "__repr__",
)
_MOST_PENDING = 256


class CopyHooks:
    """Silent copies as hits of kind `h2d_pageable`, early reads as `d2h_race`."""

    def __init__(self, log: HitLog) -> None:
        self._log = log
        self.pending: dict[int, Any] = {}  # address of the host memory -> weak reference to the tensor
        self._patches: Patches | None = None
        self._watching_reads = False
        self._local = threading.local()

    def install(self, patches: Patches) -> None:
        """Replace the copying methods of torch.Tensor through `patches`."""
        tensor: Any = sys.modules["torch"].Tensor
        self._patches = patches
        for name, replacement in (("to", self._copy), ("cuda", self._copy), ("copy_", self._copy_into)):
            patches.replace(tensor, name, TensorMethod(getattr(tensor, name), replacement))

    def forget(self) -> None:
        """After the patches are undone."""
        self._patches = None
        self.pending.clear()
        self._watching_reads = False

    def arrived(self) -> None:
        """The host waited for the device: whatever was on its way has come."""
        if self.pending:
            self.pending.clear()

    def _copy(self, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 and "non_blocking" not in kwargs:
            return original(tensor, *args, **kwargs)
        # Positional in .to(device, dtype, non_blocking), .to(other, non_blocking) and .cuda(device, non_blocking).
        positional = next((value for value in args[1:] if isinstance(value, bool)), False)
        if not kwargs.get("non_blocking", positional):
            return original(tensor, *args, **kwargs)
        if self._nested():
            return original(tensor, *args, **kwargs)
        result = self._outermost(original, tensor, *args, **kwargs)
        self._copied(tensor, result, sys._getframe(2))
        return result

    def _copy_into(self, original: Any, target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if not (kwargs.get("non_blocking") or (args and args[0])):
            return original(target, source, *args, **kwargs)
        if self._nested():
            return original(target, source, *args, **kwargs)
        result = self._outermost(original, target, source, *args, **kwargs)
        self._copied(source, target, sys._getframe(2))
        return result

    def _nested(self) -> bool:
        # A subclass of Tensor dispatches back to whatever stands on torch.Tensor: us.
        return self._patches is None or getattr(self._local, "copying", False)

    def _outermost(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._local.copying = True
        try:
            return original(*args, **kwargs)
        finally:
            self._local.copying = False

    def _copied(self, source: Any, target: Any, frame: Any) -> None:
        tensor = sys.modules["torch"].Tensor
        if not (isinstance(source, tensor) and isinstance(target, tensor)) or _imaginary(source):
            return
        if source.is_cuda == target.is_cuda:
            return
        now = time.time_ns()
        if target.is_cuda:
            if not source.is_pinned():
                self._log.add("h2d_pageable", frame, now, now)
            return
        if len(self.pending) < _MOST_PENDING:
            address = target.untyped_storage().data_ptr()
            self.pending[address] = weakref.ref(target, lambda _: self.pending.pop(address, None))
        self._watch_reads()

    def _watch_reads(self) -> None:
        if self._watching_reads or self._patches is None:
            return
        torch: Any = sys.modules["torch"]
        self._watching_reads = True
        for name in _READS:
            self._patches.replace(torch.Tensor, name, TensorMethod(getattr(torch.Tensor, name), self._read))
        self._patches.replace(torch.cuda.Event, "query", self._asked(torch.cuda.Event.query))

    def _read(self, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self.pending and not tensor.is_cuda and not _imaginary(tensor):
            address = tensor.untyped_storage().data_ptr()
            if self.pending.pop(address, None) is not None:
                now = time.time_ns()
                self._log.add("d2h_race", sys._getframe(2), now, now)
        return original(tensor, *args, **kwargs)

    def _asked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def asked(event: Any, *args: Any, **kwargs: Any) -> Any:
            done = original(event, *args, **kwargs)
            if done is True:
                self.arrived()
            return done

        return asked


def _imaginary(tensor: Any) -> bool:
    # Inside torch.compile's tracing the tensors are fake: no copy happens.
    compiler = sys.modules["torch"].compiler
    return bool(compiler.is_compiling()) or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")
