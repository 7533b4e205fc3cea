"""Parameters of lazy modules (LazyLinear), which are told their device before they have memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from perfdoctor.emulate.patches import Patches

_ON_DEVICE = "_perfdoctor_on_device"


def install(patches: Patches) -> None:
    """Let `materialize` make device tensors where the module was moved before."""
    materialize = UninitializedTensorMixin.materialize

    def materialize_there(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        there = self.__dict__.pop(_ON_DEVICE, False) and device is None
        materialize(self, shape, device, dtype)
        if there:
            self.data = torch.empty(shape, dtype=self.dtype, device="cuda")

    patches.set(UninitializedTensorMixin, "materialize", materialize_there)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no memory yet."""
    return isinstance(tensor, UninitializedTensorMixin)


def note_move(tensor: torch.Tensor, there: bool) -> torch.Tensor:
    """Remember the device for `materialize`."""
    tensor.__dict__[_ON_DEVICE] = there
    return tensor
