"""Calls whose result has a size that the host must read: `x[mask]`, nonzero, unique, ...: with what came of it before.

`x[mask]` gathers with the indices of the step before, so that its own work is still done; the others give their whole
result of the step before. Only where the sizes stay the same from step to step: a stale index past the end would kill
the CUDA context, and a stale size would not fit what it meets.
"""

from __future__ import annotations

import sys
from typing import Any

from perfdoctor.trial.call_hooks import CallHooks, Place
from perfdoctor.trial.neutraliser import Mode, Neutraliser

_METHODS = ("nonzero", "masked_select", "unique", "unique_consecutive", "repeat_interleave", "bincount", "argwhere")
_FUNCTIONS = (*_METHODS, "where")


class NeutralMask(Neutraliser):
    """Calls keyed by their ordinal within the step."""

    modes = (Mode(name="gone", text="with the indices of the step before"),)

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place
        self._ordinal = 0
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._sizes: dict[int, set[Any]] = {}

    def install(self, hooks: CallHooks) -> None:
        torch = sys.modules["torch"]
        hooks.add(torch.Tensor, "__getitem__", self._place, self.index)
        for name in _METHODS:
            hooks.add(torch.Tensor, name, self._place, self.compute)
        for name in _FUNCTIONS:
            hooks.add(torch, name, self._place, self.compute)
        hooks.add(torch.nn.functional, "one_hot", self._place, self.compute)

    def stepped(self) -> None:
        super().stepped()
        self._ordinal = 0

    def refusal(self) -> str:
        if not self._sizes:
            return "no call that Python sees has a size of its data here"
        if any(len(sizes) > 1 for sizes in self._sizes.values()):
            return "cannot be neutralised safely: the size of the result changes from step to step"
        return ""

    def index(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`x[index]`, where the index holds a mask."""
        tensor, index = args
        masks = _masks(index)
        if not tensor.is_cuda or not masks:
            return original(*args, **kwargs)
        if not self.mode:
            return self._observed(original(*args, **kwargs), tensor.shape)
        ordinal = self._next()
        kept = self._kept.get(ordinal)
        signature = (tensor.shape, tuple(mask.shape for mask in masks))
        if not self.answering or kept is None or kept[0] != signature:
            self._kept[ordinal] = kept = (signature, _as_indices(index))
        return original(tensor, kept[1])

    def compute(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that gives a result of unknown size."""
        tensor = args[0]
        known = original.__name__ == "where" and (len(args) > 1 or kwargs)
        if known or not getattr(tensor, "is_cuda", False):
            return original(*args, **kwargs)
        if not self.mode:
            return self._observed(original(*args, **kwargs), tensor.shape)
        ordinal = self._next()
        kept = self._kept.get(ordinal)
        signature = (original.__name__, tensor.shape)
        if not self.answering or kept is None or kept[0] != signature or _carries_graph(tensor):
            self._kept[ordinal] = kept = (signature, original(*args, **kwargs))
        return kept[1]

    def _next(self) -> int:
        ordinal = self._ordinal
        self._ordinal = ordinal + 1
        return ordinal

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
