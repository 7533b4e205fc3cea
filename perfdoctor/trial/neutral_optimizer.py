"""Single-tensor optimizers: their fused form (the multi-tensor one where there is none), switched between steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from perfdoctor.trial.neutraliser import Mode, Neutraliser

_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


class NeutralOptimizer(Neutraliser):
    """`fused` and `foreach` of every group, and where the step counters lie; put back exactly when off."""

    modes = (Mode(name="fused", text="fused (or multi-tensor) update"),)

    def __init__(self, optimizers: Sequence[Any]) -> None:
        super().__init__()
        self._optimizers = [each for each in optimizers if is_single_tensor(each)]
        self._flags: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._counters: list[tuple[dict[str, Any], Any]] = []

    def refusal(self) -> str:
        if not self._optimizers:
            return "no optimizer here works tensor by tensor with torch's own update"
        return next((why for each in self._optimizers if (why := _unfit(each))), "")

    def switch(self, mode: str) -> None:
        super().switch(mode)
        self._restore()
        if mode:
            for optimizer in self._optimizers:
                self._fuse(optimizer)

    def remove(self) -> None:
        self._restore()

    def _fuse(self, optimizer: Any) -> None:
        fused = type(optimizer).__name__ in _FUSED
        for group in optimizer.param_groups:
            self._flags.append((group, {name: group[name] for name in ("fused", "foreach") if name in group}))
            if fused:
                group["fused"], group["foreach"] = True, False
            else:
                group["foreach"] = True
        if fused:
            for parameter, state in optimizer.state.items():
                self._move_counter(parameter, state)

    def _move_counter(self, parameter: Any, state: dict[str, Any]) -> None:
        counter = state.get("step")
        if isinstance(counter, sys.modules["torch"].Tensor) and counter.device != parameter.device:
            self._counters.append((state, counter))
            state["step"] = counter.to(parameter.device)

    def _restore(self) -> None:
        for group, flags in self._flags:
            group.update(flags)
        for state, counter in self._counters:
            counter.copy_(state["step"])  # the count goes on
            state["step"] = counter
        self._flags.clear()
        self._counters.clear()


def is_single_tensor(optimizer: Any) -> bool:
    """Whether the update of an optimizer goes tensor by tensor: told so, or torch's default where nothing was said."""
    group = optimizer.param_groups[0]
    if type(optimizer).__module__.split(".")[0] != "torch" or "foreach" not in group:
        return False
    if group.get("fused") or group.get("foreach"):
        return False
    if group.get("foreach") is False:
        return True
    return not all(parameter.is_cuda for parameter in group["params"])


def _unfit(optimizer: Any) -> str:
    torch: Any = sys.modules["torch"]
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), torch.Tensor):
            return "the learning rate is a tensor"
        if group.get("differentiable"):
            return "the optimizer is differentiable"
        for parameter in group["params"]:
            if parameter.is_sparse or parameter.is_complex():
                return "sparse or complex parameters have no fused update"
            if parameter.grad is not None and parameter.grad.is_sparse:
                return "sparse gradients have no fused update"
    return ""
