"""Optimizers inside a CUDA graph: what makes them capturable, their learning rate as a device tensor, their state.

A graph repeats kernels with the numbers they were launched with. So counters must be device tensors, and so must the
learning rate, or a schedule would be ignored on replay. Adam and its kin have `capturable=True` for that; SGD takes a
learning rate from the device in its fused form alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import optim

from perfdoctor.errors import TreatmentRefused

_FUSED = (optim.SGD,)
# Their foreach form takes the learning rate from the device, their single-tensor form reads it.
_FOREACH = (optim.RMSprop, optim.Adadelta)
_CAPTURABLE = (
    optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.ASGD, optim.Rprop, *_FOREACH,
)  # fmt: skip


def refusal(optimizer: optim.Optimizer) -> str | None:
    """Why this optimizer cannot be part of a graph, with the change to make; None where it can be made to."""
    name = type(optimizer).__name__
    if isinstance(optimizer, optim.LBFGS):
        return "LBFGS decides on the host how often it calls the model; use Adam or SGD"
    if isinstance(optimizer, _CAPTURABLE):
        return None
    if isinstance(optimizer, _FUSED):
        return _fused_refusal(optimizer, name)
    if all("capturable" in group for group in optimizer.param_groups):
        return None
    if type(optimizer).__module__.startswith("torch.optim"):
        return f"torch.optim.{name} has no capturable form; use AdamW(capturable=True) or SGD(fused=True)"
    return (
        f"{name} has no `capturable` option, so its counters may be Python numbers; give it device counters and a "
        "`capturable` entry in its param groups, or use torch.optim.AdamW(capturable=True)"
    )


def _fused_refusal(optimizer: optim.Optimizer, name: str) -> str | None:
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return f"{name}(differentiable=True) has no fused form, and only that takes its learning rate from a tensor"
        if any(not p.is_floating_point() for p in group["params"]):
            return (
                f"{name} over complex parameters has no fused form, and only that takes its learning rate from a tensor"
            )
        if group.get("dampening") and group.get("momentum") and not optimizer.state:
            return f"{name}(dampening=...) treats its first step otherwise: call train_step once before graphing it"
    return None


def is_ready(optimizer: optim.Optimizer) -> bool:
    """Whether the optimizer can be captured as the user built it (its learning rate aside)."""
    if isinstance(optimizer, _FUSED):
        return refusal(optimizer) is None
    return all(group.get("capturable") for group in optimizer.param_groups)


def takes_tensor_rate(optimizer: optim.Optimizer) -> bool:
    """Whether the learning rate may be a device tensor without being read back."""
    return isinstance(optimizer, (*_CAPTURABLE, *_FUSED))


def make_capturable(optimizer: optim.Optimizer) -> None:
    """Change the optimizer in place: capturable, its learning rate a float32 device tensor, its counters on the device.

    Numbers differ from the uncapturable form in the last bits (bias correction and rate in float32 on the device).

    Raises:
        TreatmentRefused: it has no capturable form.
    """
    reason = refusal(optimizer)
    if reason is not None:
        raise TreatmentRefused(reason)
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if isinstance(optimizer, _FUSED):
            group["fused"], group["foreach"] = True, False
        elif isinstance(optimizer, _FOREACH) and not group.get("differentiable"):
            group["foreach"] = True
        if takes_tensor_rate(optimizer) and group["params"]:
            group["lr"] = _device_rate(group["lr"], group["params"][0].device)
        for p in group["params"]:
            _move_counters(optimizer.state.get(p), p.device)
    # torch warns once when a capturable optimizer steps outside a graph; odd batches do so on purpose.
    optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]


def _device_rate(rate: Any, device: torch.device) -> torch.Tensor:
    if isinstance(rate, torch.Tensor):
        return rate if rate.device == device else rate.to(device, torch.float32)
    return torch.full((), float(rate), dtype=torch.float32, device=device)


def _move_counters(state: Any, device: torch.device) -> None:
    for name, value in (state or {}).items():
        if isinstance(value, torch.Tensor) and value.device != device and value.numel() == 1:
            state[name] = value.to(device)


_forms: WeakKeyDictionary[optim.Optimizer, tuple[list[dict[str, Any]], WeakSet[Any]]] = WeakKeyDictionary()
"""settings of the param groups as the user built them, and the graphed steps that are at work on the optimizer"""
_CHANGED = ("capturable", "fused", "foreach", "lr")  # what `make_capturable` writes


def hold_form(optimizer: optim.Optimizer, holder: Any) -> None:
    """Note the optimizer's own form, groups added since included; several graphed steps may share an optimizer."""
    groups, holders = _forms.setdefault(optimizer, ([], WeakSet()))
    if not holders and any(not isinstance(group.get("lr"), torch.Tensor) for group in optimizer.param_groups):
        groups.clear()  # it has its own form: what was dropped without a release is of no account any more
    # Without the parameters: a hook of theirs may hold the optimizer, which would then live as long as the process.
    groups += [{n: group[n] for n in _CHANGED if n in group} for group in optimizer.param_groups[len(groups) :]]
    holders.add(holder)


def let_go(optimizer: optim.Optimizer, holder: Any, *, is_as_before: bool = False) -> None:
    """Give the optimizer its own form back when the last graphed step lets go of it, unless it has it already."""
    if optimizer not in _forms:  # given twice
        return
    groups, holders = _forms[optimizer]
    holders.discard(holder)
    if not holders and not is_as_before:
        del _forms[optimizer]
        give_back(optimizer, groups)


def give_back(optimizer: optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """The optimizer's own settings again, with the rate it has now; state values stay."""
    for group, before in zip(optimizer.param_groups, groups, strict=False):
        for name, value in before.items():
            group[name] = _given_back(group[name], value) if name == "lr" else value
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            step = state.get("step")
            if isinstance(step, torch.Tensor) and not (group.get("capturable") or group.get("fused")):
                state["step"] = step.cpu()
    optimizer.__dict__.pop("_warned_capturable_if_run_uncaptured", None)


def _given_back(rate: Any, before: Any) -> Any:
    """The rate as what it was before: a tensor, or a number, the very one where float32 alone made another of it."""
    if isinstance(before, torch.Tensor):
        return before if before is rate else before.copy_(rate)  # one in host memory
    number = float(rate)
    return before if number == torch.tensor(before, dtype=torch.float32).item() else number


class LearningRates:
    """The device tensors that graphs read their learning rates from, one a param group.

    Schedulers fill them in place; one that writes a number (or user code) into `group["lr"]` is followed: the number
    goes into the tensor without waiting for the device, and the tensor back into the group.
    """

    def __init__(self, optimizers: Sequence[optim.Optimizer]) -> None:
        self._held = [
            (group, group["lr"])
            for optimizer in optimizers
            for group in optimizer.param_groups
            if isinstance(group.get("lr"), torch.Tensor) and group["lr"].device.type != "cpu"
        ]

    def follow(self) -> None:
        """Take over what was written since the last call."""
        for group, rate in self._held:
            written = group["lr"]
            if written is rate:
                continue
            if isinstance(written, torch.Tensor):
                rate.copy_(written.reshape(rate.shape), non_blocking=True)
            else:
                rate.fill_(float(written))
            group["lr"] = rate


def frozen_numbers(optimizers: Sequence[optim.Optimizer]) -> Hashable:
    """What a graph holds of the param groups as numbers (weight decay, betas, ...): part of its key."""
    return tuple(
        tuple([(name, value) for name, value in group.items() if type(value) in _NUMBERS and name not in _UNUSED])
        for optimizer in optimizers
        for group in optimizer.param_groups
    )


_NUMBERS = (bool, int, float, tuple)
# Written by schedulers for themselves.
_UNUSED = frozenset(("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"))


@contextmanager
def initial_state_noted(optimizers: Sequence[optim.Optimizer]) -> Iterator[dict[tuple[int, str], torch.Tensor]]:
    """Inside, state that an optimizer makes on its first step is kept as it was made, by parameter id and name."""
    noted: dict[tuple[int, str], torch.Tensor] = {}
    wrapped = [optimizer for optimizer in optimizers if hasattr(optimizer, "_init_group")]
    for optimizer in wrapped:
        optimizer._init_group = _noting(optimizer, noted)
    try:
        yield noted
    finally:
        for optimizer in wrapped:
            optimizer.__dict__.pop("_init_group", None)


def _noting(optimizer: Any, noted: dict[tuple[int, str], torch.Tensor]) -> Callable[..., Any]:
    initialise = optimizer._init_group

    def initialised(group: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        out = initialise(group, *args, **kwargs)
        for p in group["params"]:
            for name, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor) and (id(p), name) not in noted:
                    noted[id(p), name] = value.detach().clone()
        return out

    return initialised


def check_state(optimizers: Sequence[optim.Optimizer]) -> None:
    """Everything an optimizer remembers must be on the device.

    Raises:
        TreatmentRefused: a counter is a Python number or a host tensor.
    """
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                on_host = isinstance(value, torch.Tensor) and value.device.type == "cpu"
                if on_host or isinstance(value, bool | int | float):
                    kind = "a host tensor" if on_host else "a Python number"
                    raise TreatmentRefused(
                        f"{type(optimizer).__name__} keeps its state[{name!r}] as {kind}, which a graph would freeze; "
                        "use torch.optim.AdamW(capturable=True), or keep it as a device tensor"
                    )


def settle_state(
    optimizer: optim.Optimizer,
    before: dict[tuple[int, str], torch.Tensor],
    initial: dict[tuple[int, str], torch.Tensor],
) -> None:
    """State tensors stay where they are and hold what they held before any step.

    `before`: values by parameter id and name; `initial`: those of state that did not exist then.

    Raises:
        TreatmentRefused: the first value of some new state is not known.
    """
    for p, state in optimizer.state.items():
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            found = before.get((id(p), name), initial.get((id(p), name)))
            if found is not None:
                value.copy_(found)
            elif isinstance(optimizer, optim.SGD):
                value.zero_()  # a momentum of zero gives the first gradient itself, as SGD's first step does
            else:
                raise TreatmentRefused(
                    f"what {type(optimizer).__name__} starts its state[{name!r}] from is not known: "
                    "call train_step once before graphing it"
                )
