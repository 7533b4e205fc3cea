"""Hooks round the updates of torch's optimizers: what is to be checked before, and updates skipped on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from perfdoctor.errors import TreatmentRefused

_ABSENT = object()
_skipping: WeakKeyDictionary[Optimizer, OptimizerHooks] = WeakKeyDictionary()
"""whose `found_inf` an update has at this moment: two in one update could not give back what was there before"""


def refuse_to_skip(optimizer: Optimizer) -> None:
    """Raises TreatmentRefused where this optimizer cannot leave an update out on the device."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise TreatmentRefused(
            f"on_hit='skip': {type(optimizer).__name__} cannot skip an update on the device. Make it with fused=True "
            "(Adam, AdamW, SGD), or use on_hit='raise' or a function"
        )


def start_momentum(optimizer: Optimizer) -> None:
    """Before an update of a fused SGD: zeros as the momentum of those parameters that have none yet.

    From zero the update gives the gradient itself, as a first one does. Left to torch, it is made from memory as it is
    found, which stays where the update is skipped on the device; and one parameter that comes later than others fails.

    Raises:
        TreatmentRefused: with dampening a first update is another.
    """
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else []
    if len(optimizer.state) >= sum([len(group["params"]) for group in groups]):
        return  # as in every step but the first ones
    for group in groups:
        if not (group.get("momentum") and group.get("fused")):
            continue
        state = optimizer.state
        new = [p for p in group["params"] if p.grad is not None and state[p].get("momentum_buffer") is None]
        if new and group.get("dampening"):
            raise TreatmentRefused(
                f"a fused {type(optimizer).__name__}(dampening=...) treats the first update of a parameter otherwise, "
                "and it would be over though it was skipped on the device: take one step before"
            )
        for parameter in new:
            state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


class OptimizerHooks:
    """From `install` to `remove`: calls `check(optimizer)` before each update of those that `concerns` says.

    With `skips` the optimizer then gets `found()` as its `found_inf` for that update, beside one that a GradScaler set.
    An update with a closure makes its gradients itself: it is checked afterwards, and refused where it would skip.
    """

    def __init__(self, concerns: Callable[[Optimizer], bool], check: Callable[[Optimizer], None],
                 found: Callable[[], Tensor], skips: bool) -> None:  # fmt: skip
        self._concerns = concerns
        self._check = check
        self._found = found
        self._skips = skips
        self._handles: list[Any] = []
        self._before: dict[int, tuple[Optimizer, object]] = {}

    def install(self) -> None:
        """Register with every torch optimizer there is or will be."""
        self._handles = [
            register_optimizer_step_pre_hook(self._starting),
            register_optimizer_step_post_hook(self._ended),
        ]

    def remove(self) -> None:
        """Take the hooks back, and a `found_inf` that an update which failed has left."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for optimizer, _ in list(self._before.values()):
            self._give_back(optimizer)

    def _starting(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._concerns(optimizer):
            return
        if self._skips:
            refuse_to_skip(optimizer)
        if _has_closure(args, kwargs):
            if self._skips:
                raise TreatmentRefused(
                    "on_hit='skip': an update with a closure makes its gradients after it was decided to skip: call "
                    "backward() before optimizer.step(), or use on_hit='raise'"
                )
            return
        self._give_back(optimizer)
        self._check(optimizer)
        if self._skips:
            self._skip_where_found(optimizer)

    def _ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if _has_closure(args, kwargs) and self._concerns(optimizer):
            self._check(optimizer)
        self._give_back(optimizer)

    def _skip_where_found(self, optimizer: Any) -> None:
        start_momentum(optimizer)
        if _skipping.setdefault(optimizer, self) is not self:
            raise TreatmentRefused(
                f"on_hit='skip': another NonFiniteWatch skips updates of this {type(optimizer).__name__}, and one is "
                "enough: give the other on_hit='raise' or a function"
            )
        before = getattr(optimizer, "found_inf", _ABSENT)
        self._before[id(optimizer)] = (optimizer, before)
        mine = self._found()
        optimizer.found_inf = torch.maximum(mine, before) if isinstance(before, Tensor) else mine

    def _give_back(self, optimizer: Any) -> None:
        """The `found_inf` from before this update, or none."""
        if id(optimizer) not in self._before:
            return
        before = self._before.pop(id(optimizer))[1]
        _skipping.pop(optimizer, None)
        if before is not _ABSENT:
            optimizer.found_inf = before
        elif hasattr(optimizer, "found_inf"):
            del optimizer.found_inf


def _has_closure(args: Any, kwargs: Any) -> bool:
    """The hooks get the arguments of `step`, the optimizer itself first."""
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
