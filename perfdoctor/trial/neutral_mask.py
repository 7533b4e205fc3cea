"""Calls whose result has a size that the host must read: `x[mask]`, nonzero, unique, ...: with what came of it before.

`x[mask]` gathers with the indices that the same batch had the last time, so that its own work is still done; the others
give their whole result of that time. Only where each batch, of the few that the trial replays, always gives the same
sizes: a stale index past the end would kill the CUDA context, and a stale size would not fit what it meets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from perfdoctor.trial.call_hooks import CallHooks, Place
from perfdoctor.trial.neutraliser import Mode, OrderedCalls

_METHODS = ("nonzero", "masked_select", "unique", "unique_consecutive", "repeat_interleave", "bincount", "argwhere")
_FUNCTIONS = (*_METHODS, "where")


class NeutralMask(OrderedCalls):
    """Calls keyed by the batch of the step and by their ordinal within it."""

    modes = (Mode(name="gone", text="with the indices that the same batch had the last time"),)

    def __init__(self, place: Place, batch: Callable[[], int] = lambda: 0) -> None:
        """`batch()`: which of the replayed batches the step trains on."""
        super().__init__()
        self._place, self._batch = place, batch
        self._kept: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._sizes: dict[tuple[int, int], set[Any]] = {}

    def install(self, hooks: CallHooks) -> None:
        torch = sys.modules["torch"]
        hooks.add(torch.Tensor, "__getitem__", self._place, self.index)
        for name in _METHODS:
            hooks.add(torch.Tensor, name, self._place, self.compute)
        for name in _FUNCTIONS:
            hooks.add(torch, name, self._place, self.compute)
        hooks.add(torch.nn.functional, "one_hot", self._place, self.compute)

    def refusal(self) -> str:
        if not self._sizes:
            return "no call that Python sees has a size of its data here"
        if any(len(sizes) > 1 for sizes in self._sizes.values()):
            return "cannot be neutralised safely: the same batch gives another size each time"
        return ""

    def index(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`x[index]`, where the index holds a mask."""
        tensor, index = args
        masks = _masks(index)
        if not tensor.is_cuda or not masks:
            return original(*args, **kwargs)
        signature = (tensor.shape, tuple(mask.shape for mask in masks))
        if not self.mode:
            if self.observing:
                self._kept[self._batch(), self._ordinal] = (signature, _as_indices(index))
            return self._observed(original(*args, **kwargs), tensor.shape)
        key = self._next()
        kept = self._kept.get(key)
        if not self.answering or kept is None or kept[0] != signature:
            self._kept[key] = kept = (signature, _as_indices(index))
        return original(tensor, kept[1])

    def compute(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that gives a result of unknown size."""
        tensor = args[0]
        known = original.__name__ == "where" and (len(args) > 1 or kwargs)
        if known or not getattr(tensor, "is_cuda", False):
            return original(*args, **kwargs)
        signature = (original.__name__, tensor.shape)
        if not self.mode:
            key, result = (self._batch(), self._ordinal), original(*args, **kwargs)
            if self.observing and not _carries_graph(tensor):
                self._kept[key] = (signature, result)
            return self._observed(result, tensor.shape)
        key = self._next()
        kept = self._kept.get(key)
        if not self.answering or kept is None or kept[0] != signature or _carries_graph(tensor):
            self._kept[key] = kept = (signature, original(*args, **kwargs))
        return kept[1]

    def _next(self) -> tuple[int, int]:
        ordinal = self._next_ordinal()
        return self._batch(), ordinal

    def _observed(self, result: Any, shape: Any) -> Any:
        if self.observing:
            sizes = tuple(each.shape for each in result) if isinstance(result, tuple) else result.shape
            self._sizes.setdefault(self._next(), set()).add((shape, sizes))
            self.num_calls += 1
        return result

    def remove(self) -> None:
        self._kept.clear()


def _masks(index: Any) -> list[Any]:
    torch: Any = sys.modules["torch"]
    parts = index if isinstance(index, tuple) else (index,)
    return [part for part in parts if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)]


def _as_indices(index: Any) -> Any:
    """The same index with each mask as the integer indices it stands for."""
    torch: Any = sys.modules["torch"]
    rows: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
            rows.extend(part.nonzero(as_tuple=True))
        else:
            rows.append(part)
    return tuple(rows)


def _carries_graph(tensor: Any) -> bool:
    # A result that autograd goes through belongs to its own step's graph.
    torch: Any = sys.modules["torch"]
    return bool(tensor.requires_grad and torch.is_grad_enabled())
