"""Marks on storages: pinned host memory, and device memory on its way through a file.

torch keeps a storage's Python object alive as long as its memory, so an attribute on it is shared by every view.
"""

from __future__ import annotations

from typing import Any

import torch

_PINNED = "_perfdoctor_pinned"
_DEVICE = "_perfdoctor_device"


def mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Note that the memory of `tensor` is page-locked."""
    setattr(tensor.untyped_storage(), _PINNED, True)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the memory of a host tensor is page-locked."""
    if tensor.layout is not torch.strided:
        return False
    return getattr(tensor.untyped_storage(), _PINNED, False)


def mark_device(storage: Any) -> None:
    """Note that a storage is device memory, for torch.save and torch.load."""
    setattr(getattr(storage, "_untyped_storage", storage), _DEVICE, True)


def is_device(storage: Any) -> bool:
    """Whether a storage was marked by `mark_device`."""
    return getattr(getattr(storage, "_untyped_storage", storage), _DEVICE, False)
