"""A loop whose next steps are thrown away: its state when they begin, put back when they end or are broken off.

They begin and end where an optimizer has updated; what a step does behind that (a schedule, a scaler, a clamp) follows
by itself where they end in the same place. Broken off anywhere else it must be put back as well: so what the loop
changed by the start of its next step, when it asks for a batch, or at the latest when it updates, is noted on top.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from perfdoctor.treat.snapshot import KeptTensor, Models, RandomState
from perfdoctor.trial.loader_replay import LoaderReplay
from perfdoctor.trial.loop_state import LoopState


class KeptLoop:
    """Taken where a step's update ends; `put_back` once. Until the next step begins it listens for that."""

    def __init__(self, state: LoopState, optimizers: Sequence[torch.optim.Optimizer], replay: LoaderReplay) -> None:
        self._state = state
        self._optimizers = tuple(optimizers)
        self._replay = replay
        self._rest: _Rest | None = None
        self._handle: Any = None
        if self._optimizers:  # else it is taken where a step begins
            # At this point torch iterates over the hooks behind a step: to those before it one can be added.
            self._handle = register_optimizer_step_pre_hook(self._updates)
            replay.asked = self._asks

    @classmethod
    def of(
        cls, models: Models, optimizers: Sequence[torch.optim.Optimizer], device: torch.device, replay: LoaderReplay
    ) -> KeptLoop:
        """Keep what the loop's steps change; `replay` says when it asks for a batch. May wait for the device."""
        return cls(LoopState.of(models, optimizers, device), optimizers, replay)

    def put_back(self, *, midway: bool) -> None:
        """The state as it was. `midway`: the loop does not stand where it stood then, at the end of an update."""
        self._stop_listening()
        if not midway:
            self._state.restore()
        elif self._rest is not None:
            self._state.restore()
            self._rest.put_back()
        elif not self._optimizers:
            self._state.restore()
        # Else the step is not over in which it was taken: all is as the loop left it.

    def _asks(self) -> None:
        self._stop_listening()
        self._note(whole=True)

    def _updates(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # the hook stays: torch is iterating over those before a step
            self._note(whole=False)

    def _note(self, *, whole: bool) -> None:
        if self._rest is None:
            self._rest = _Rest.of(self._state, self._optimizers, whole=whole)

    def _stop_listening(self) -> None:
        self._replay.asked = _nothing
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """What the loop changed between the end of an update and its next step."""

    tensors: tuple[KeptTensor, ...]
    gradients: tuple[tuple[torch.Tensor, KeptTensor | None], ...]
    groups: tuple[tuple[dict[str, Any], dict[str, Any]], ...]
    followers: tuple[tuple[Any, dict[str, Any]], ...]
    random: RandomState | None

    @classmethod
    def of(cls, state: LoopState, optimizers: Sequence[torch.optim.Optimizer], *, whole: bool) -> _Rest:
        """Now. Not `whole`: the next step has been forward and back already, so that its own traces are left out."""
        parameters = state.snapshot.parameters
        kept = [each.kept for each in parameters] + (list(_buffers(state)) if whole else [])
        with torch.no_grad():
            return cls(
                tensors=tuple(KeptTensor.of(each.tensor, torch.clone) for each in kept if _is_changed(each)),
                gradients=tuple(_gradient(each) for each in parameters) if whole else (),
                groups=tuple((group, _settings(group)) for each in optimizers for group in each.param_groups),
                followers=tuple((each, copy.deepcopy(each.state_dict())) for each, _ in state.followers),
                random=RandomState.take([each for each, _ in state.snapshot.random.generators]) if whole else None,
            )

    def put_back(self) -> None:
        """On top of the state at the end of the update."""
        with torch.no_grad():
            for kept in self.tensors:
                kept.put_back()
            for parameter, gradient in self.gradients:
                parameter.grad = None if gradient is None else gradient.tensor
                if gradient is not None:
                    gradient.put_back()
            for group, settings in self.groups:
                _set(group, settings)
        for follower, state in self.followers:
            follower.load_state_dict(copy.deepcopy(state))
        if self.random is not None:
            self.random.restore()


def _buffers(state: LoopState) -> Iterator[KeptTensor]:
    for module in state.snapshot.modules:
        yield from (each for each in module.buffers.values() if each is not None)


def _is_changed(kept: KeptTensor) -> bool:
    now = kept.tensor.detach()
    return now.shape != kept.values.shape or not torch.equal(now.to(kept.values.device), kept.values)


def _gradient(parameter: Any) -> tuple[torch.Tensor, KeptTensor | None]:
    """A gradient that is as it was costs no second copy."""
    tensor = parameter.kept.tensor
    grad = tensor.grad if tensor.is_leaf else None
    if grad is None:
        return tensor, None
    before = parameter.grad
    same = before is not None and before.tensor is grad and not _is_changed(before)
    return tensor, before if same else KeptTensor.of(grad, torch.clone)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The learning rate and all else beside the parameters."""
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _set(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        held = group.get(name)
        if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor):
            held.copy_(value)
        else:
            group[name] = value


def _nothing() -> None:
    pass
