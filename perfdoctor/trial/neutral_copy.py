"""Copies from the host to the device at one line: pinned and not waited for, or answered with the tensor of before."""

from __future__ import annotations

import sys
from typing import Any

from perfdoctor.trial.call_hooks import CallHooks, Place
from perfdoctor.trial.neutraliser import Mode, OrderedCalls

PINNED = Mode(name="pinned", text="from a pinned twin, non_blocking=True")
GONE = Mode(name="gone", text="answered with the device tensor of the step before", prediction=False)
MADE_ONCE = Mode(name="gone", text="made on the device once: the tensor of the step before")

_METHODS = ("to", "cuda", "copy_")
_FACTORIES = ("tensor", "as_tensor", "asarray", "full", "zeros", "ones", "arange", "scalar_tensor", "from_numpy")
_MOST_TWINS = 256
_MOST_BYTES = 8 << 30


class PinnedTwins:
    """A pinned copy of each source, made once: by storage, layout and version.

    Of a source that has none, the twin of the same copy in another step stands in: never that of another copy on the
    line, whose values may mean something else (tokens, and labels). Sources are kept, so that no other tensor comes to
    lie where one of them lay.
    """

    def __init__(self) -> None:
        self._exact: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._by_call: dict[tuple[Any, ...], Any] = {}
        self._num_bytes = 0

    def of(self, source: Any, ordinal: int, *, make: bool) -> Any:
        """The twin of `source`, None where there is none and none is to be made. `ordinal`: the copy's, in its step."""
        shape = (source.shape, source.dtype)
        key = (source.untyped_storage().data_ptr(), source.storage_offset(), source.stride(), source._version, *shape)
        found, _ = self._exact.get(key, (None, None))
        if found is None and make and self._room(source):
            kept = source.detach()
            found = kept if kept.is_pinned() else kept.pin_memory()
            self._exact[key] = found, kept
            self._by_call[ordinal, *shape] = found
            self._num_bytes += source.nbytes
        return found if found is not None else self._by_call.get((ordinal, *shape))

    def _room(self, source: Any) -> bool:
        return len(self._exact) < _MOST_TWINS and self._num_bytes + source.nbytes <= _MOST_BYTES


class NeutralCopy(OrderedCalls):
    """Copies keyed by their ordinal within the step. `building`: a tensor built on the host for this copy alone."""

    def __init__(self, place: Place, *, building: bool) -> None:
        super().__init__()
        self.modes = (MADE_ONCE,) if building else (PINNED, GONE)
        self._place = place
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._twins = PinnedTwins()
        self._pinning = not building
        self._problem = ""
        self._num_pinned = 0
        self._on_host: set[int] = set()  # ordinals of calls that copied to no device while observed

    def install(self, hooks: CallHooks) -> None:
        torch = sys.modules["torch"]
        for name in _METHODS:
            hooks.add(torch.Tensor, name, self._place, self.copy)
        for name in _FACTORIES:
            hooks.add(torch, name, self._place, self.build)

    def refusal(self) -> str:
        if self._problem:
            return self._problem
        if self.num_calls and self._num_pinned == self.num_calls:
            self.modes = (PINNED, GONE)  # pinned already, and waited for
        return "" if self.num_calls else "no call that Python sees copies a tensor to the device here"

    def copy(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`source.to(...)`, `source.cuda(...)` or `target.copy_(source)`."""
        into = original.__name__ == "copy_"
        source = args[1] if into and len(args) > 1 else args[0]
        if not isinstance(source, sys.modules["torch"].Tensor) or source.is_cuda or (into and not args[0].is_cuda):
            return original(*args, **kwargs)
        ordinal = self._next_ordinal()
        if not self.mode:
            return self._observed(original, source, args, kwargs, ordinal)
        if self.mode == PINNED.name:
            return self._pinned(original, source, args, kwargs, into, ordinal)
        if into:
            return args[0] if self.answering else original(*args, **kwargs)
        return self._answered(original, args, kwargs, (source.shape, source.dtype), ordinal)

    def build(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`torch.tensor(values, device=...)` and its like."""
        if kwargs.get("device") is None:
            return original(*args, **kwargs)
        if not self.mode:
            result = original(*args, **kwargs)
            self.num_calls += bool(result.is_cuda)
            return result
        if self.mode == PINNED.name:
            return original(*args, **kwargs)
        return self._answered(original, args, kwargs, (original.__name__, _size(args)), self._next_ordinal())

    def _observed(self, original: Any, source: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ordinal: int) -> Any:
        result = original(*args, **kwargs)
        if self.observing and result.is_cuda:
            self.num_calls += 1
            self._num_pinned += bool(source.is_pinned())
            self._pin(source, ordinal)
        elif self.observing:
            self._on_host.add(ordinal)
        return result

    def _pin(self, source: Any, ordinal: int) -> None:
        if not self._pinning and not source.is_pinned():
            return
        try:
            self._twins.of(source, ordinal, make=True)
        except RuntimeError as error:
            self._problem = f"a pinned twin cannot be made ({str(error).splitlines()[0]})"

    def _pinned(
        self, original: Any, source: Any, args: tuple[Any, ...], kwargs: dict[str, Any], into: bool, ordinal: int
    ) -> Any:
        if ordinal in self._on_host:
            return original(*args, **kwargs)
        twin = self._twins.of(source, ordinal, make=self.step_in_block < self.edge)
        if twin is None:
            return original(*args, **kwargs)
        if into:
            return original(args[0], twin, non_blocking=True)
        words = [each for each in args[1:] if not isinstance(each, bool)]  # a positional non_blocking
        return original(twin, *words, **{**kwargs, "non_blocking": True})

    def _answered(
        self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Any, ordinal: int
    ) -> Any:
        kept = self._kept.get(ordinal)
        if self.answering and kept is not None and kept[0] == signature:
            return kept[1]
        result = original(*args, **kwargs)
        self._kept[ordinal] = (signature, result if not result.requires_grad else result.detach())
        return result

    def remove(self) -> None:
        self._kept.clear()
        self._twins = PinnedTwins()


def _size(args: tuple[Any, ...]) -> Any:
    value = args[0] if args else None
    return getattr(value, "shape", None) or (len(value) if isinstance(value, list | tuple) else None)
