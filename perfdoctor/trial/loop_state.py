"""What the steps of a loop change, kept aside: a Snapshot, and what follows the optimizer beside it.

Learning-rate schedules and GradScalers are found among the living objects: without them a run from the same state
would train with another learning rate, and its losses would differ for no fault of the treatment.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from perfdoctor.treat.snapshot import Models, Snapshot
from perfdoctor.treat.treatment import Loop
from perfdoctor.watch.clocks import cuda_active

_FOLLOWERS = (LRScheduler, ReduceLROnPlateau, GradScaler)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """The state of a loop at one moment. `own_bytes` of device memory hold it: no part of what the loop needs."""

    snapshot: Snapshot
    followers: tuple[tuple[Any, dict[str, Any]], ...]
    own_bytes: int

    @classmethod
    def take(cls, loop: Loop, tensors: Sequence[torch.Tensor] = ()) -> LoopState:
        """Keep what the loop's steps change; `tensors` beside its model's. May wait for the device."""
        models: list[torch.nn.Module | torch.Tensor] = [*([] if loop.model is None else [loop.model]), *tensors]
        return cls.of(models, loop.optimizers, loop.device, _generators(loop.loader))

    @classmethod
    def of(
        cls,
        models: Models,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        generators: Sequence[torch.Generator] = (),
    ) -> LoopState:
        """The same of the parts of a loop: modules or bare tensors, optimizers, the generators beside torch's own."""
        before = allocated_bytes(device)
        snapshot = Snapshot.take(models, optimizers, generators=generators)
        own = allocated_bytes(device) - before
        found = _followers(optimizers)
        return cls(
            snapshot=snapshot,
            followers=tuple((each, copy.deepcopy(each.state_dict())) for each in found),
            own_bytes=max(own, 0),
        )

    def restore(self) -> None:
        """Put everything back. May be called any number of times."""
        self.snapshot.restore()
        for follower, state in self.followers:
            follower.load_state_dict(copy.deepcopy(state))

    def restore_random(self) -> None:
        """The random states alone: a loader that is begun now gives the same batches each time."""
        self.snapshot.random.restore()


def allocated_bytes(device: torch.device) -> int:
    """Device memory in use by tensors; 0 without a GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" and cuda_active() else 0


def _followers(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Schedules of these optimizers and scalers in use."""
    known = {id(each) for each in optimizers}
    # By type(), not isinstance(): a lazy object would be woken by being asked for its __class__.
    found = [each for each in gc.get_objects() if issubclass(type(each), _FOLLOWERS)]
    return [each for each in found if _in_use(each, known)]


def _in_use(follower: Any, optimizers: set[int]) -> bool:
    if isinstance(follower, GradScaler):
        return follower.is_enabled() and follower._scale is not None
    return id(getattr(follower, "optimizer", None)) in optimizers


def _generators(loader: Any) -> list[torch.Generator]:
    """Generators that a loader and its samplers draw from, beside torch's own."""
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
