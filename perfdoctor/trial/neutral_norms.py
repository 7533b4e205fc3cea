"""A loop that reduces every gradient to a number at one line: one multi-tensor call, its results handed out in turn.

While observed, the calls of a step are noted: `norm` for each gradient, or `pow(2)` and `sum`, `abs` and `max`, and so
on. If every step repeats the same calls on the gradients of the same parameters, the first call of an answered step
computes all norms at once; the others take theirs. Reads of the results are answered from the step before.
"""

from __future__ import annotations

import sys
from typing import Any

from perfdoctor.trial.call_hooks import CallHooks, Place
from perfdoctor.trial.neutral_inplace import loop_around
from perfdoctor.trial.neutral_read import NeutralRead
from perfdoctor.trial.neutraliser import Mode, Neutraliser

_METHODS = ("norm", "square", "pow", "abs", "sum", "max", "__pow__", "__mul__", "mul")
_MIN_TENSORS = 4
_SQUARES = ("square", "pow", "__pow__", "__mul__", "mul")


class NeutralNorms(Neutraliser):
    """See the module's text. `num_calls` counts the reducing calls, not the reads."""

    modes = (Mode(name="multi-tensor", text="one multi-tensor norm, read from the step before"),)

    def __init__(self, place: Place, optimizers: list[Any], caller: Place | None = None) -> None:
        super().__init__()
        self._place = loop_around(place)
        self._optimizers = optimizers
        self._reads = NeutralRead(self._place, caller, line=place.first)
        self._parameters: dict[int, Any] = {}  # address of a gradient -> its parameter
        self._calls: list[tuple[str, float, Any]] = []  # name, order of the norm, parameter; of this step
        self._pattern: list[tuple[str, float, int]] | None = None
        self._changed = False
        self._unknown = ""
        self._last: list[tuple[str, float, Any]] = []
        self._order = 2.0
        self._squared = False
        self._targets: list[Any] = []
        self._motif: tuple[str, ...] = ()
        self._position = 0
        self._results: list[Any] = []

    def install(self, hooks: CallHooks) -> None:
        torch = sys.modules["torch"]
        for name in _METHODS:
            hooks.add(torch.Tensor, name, self._place, self.reduce)
        for owner, name in ((torch, "norm"), (torch.linalg, "norm"), (torch.linalg, "vector_norm")):
            hooks.add(owner, name, self._place, self.reduce)
        self._reads.install(hooks)

    def switch(self, mode: str) -> None:
        super().switch(mode)
        self._reads.switch("gone" if mode else "")
        self._position, self._results = 0, []

    def stepped(self) -> None:
        super().stepped()
        self._reads.observing = self.observing
        self._reads.stepped()
        self._parameters.clear()
        self._position, self._results = 0, []
        if self.observing and self._calls:
            pattern = [(name, order, id(parameter)) for name, order, parameter in self._calls]
            self._changed = self._changed or (self._pattern is not None and pattern != self._pattern)
            self._pattern, self._last = pattern, self._calls
        self._calls = []

    def refusal(self) -> str:
        if self._pattern is None:
            return "no norm of a gradient that Python sees was called at this line"
        if self._unknown:
            return self._unknown
        if self._changed:
            return "the loop reduces other gradients from step to step"
        self._motif, why = _motif([name for name, _, _ in self._last])
        if why:
            return why
        tested = self._reads.refusal() if self._reads.num_calls else ""
        if tested:
            return tested
        width = len(self._motif)
        self._targets = [parameter for _, _, parameter in self._last[::width]]
        orders = {order for name, order, _ in self._last if name in ("norm", "vector_norm")}
        if len(orders) > 1:
            return "the loop takes norms of several orders"
        self._order = orders.pop() if orders else (float("inf") if self._motif[0] == "abs" else 2.0)
        self._squared = self._motif[0] in _SQUARES
        return ""

    def reduce(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the loop."""
        if self.answering and self._targets:
            return self._answer(original, args, kwargs)
        if self.observing:
            self._note(original.__name__, args, kwargs)
        return original(*args, **kwargs)

    def _answer(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position, width = self._position, len(self._motif)
        which = position // width
        if which >= len(self._targets) or original.__name__ != self._motif[position % width]:
            return original(*args, **kwargs)  # what comes after the loop on the same line
        self._position = position + 1
        if position % width < width - 1:
            return args[0]  # what the last call of the motif is asked for next
        if not self._results:
            self._results = self._compute()
        return self._results[which]

    def _compute(self) -> list[Any]:
        torch = sys.modules["torch"]
        with torch.no_grad():
            norms = torch._foreach_norm([parameter.grad for parameter in self._targets], self._order)
            return list(torch._foreach_mul(norms, norms)) if self._squared else list(norms)

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = args[0]
        if not self._calls:
            self._map_gradients()
        parameter = self._parameters.get(tensor.data_ptr()) if tensor.numel() else None
        if parameter is not None and _same(parameter.grad, tensor):
            order = _order_of(name, args, kwargs)
            if order is None:
                self._unknown = f"{name}({', '.join(map(repr, args[1:]))}) along a dimension has no multi-tensor form"
                return
            self._calls.append((name, order, parameter))
        elif self._calls and name in ("sum", "max") and self._calls[-1][0] not in ("sum", "max", "norm"):
            self._calls.append((name, 0.0, self._calls[-1][2]))
            if args[1:] or kwargs:
                self._unknown = f"{name} along a dimension has no multi-tensor form"

    def _map_gradients(self) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and parameter.grad.numel():
                        self._parameters[parameter.grad.data_ptr()] = parameter


def _same(grad: Any, tensor: Any) -> bool:
    return grad is not None and grad.shape == tensor.shape and grad.dtype == tensor.dtype


def _order_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The order of the norm; None for a norm along a dimension or a power that is not two."""
    if name in ("norm", "vector_norm"):
        order = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord", 2.0))
        order = 2.0 if order in (None, "fro") else order
        extra = len(args) > 2 or any(kwargs.get(each) is not None for each in ("dim", "dtype", "out"))
        return None if extra or not isinstance(order, int | float) else float(order)
    if name in ("pow", "__pow__"):
        return 2.0 if len(args) == 2 and args[1] == 2 else None
    if name in ("mul", "__mul__"):
        return 2.0 if len(args) == 2 and args[1] is args[0] else None
    return 2.0


def _motif(names: list[str]) -> tuple[tuple[str, ...], str]:
    """The calls for one gradient, and why they have no multi-tensor form ('' where they have)."""
    for width in (1, 2):
        motif = tuple(names[:width])
        if len(names) % width == 0 and names == list(motif) * (len(names) // width):
            break
    else:
        return (), "the calls of the loop follow no pattern"
    if len(names) // width < _MIN_TENSORS:
        return motif, f"only {len(names) // width} gradients are reduced here"
    last = motif[-1]
    known = motif in (("norm",), ("vector_norm",), ("abs", "max")) or (
        last == "sum" and motif[0] in _SQUARES and width == 2
    )
    return motif, "" if known else f"{' then '.join(motif)} has no multi-tensor form"
