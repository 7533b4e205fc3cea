"""torch.save writes device tensors as "cuda:0", torch.load brings them back to the emulated device."""

from __future__ import annotations

from typing import Any

import torch

from perfdoctor.emulate import border
from perfdoctor.emulate.patches import Patches
from perfdoctor.emulate.storage_marks import is_device, mark_device
from perfdoctor.emulate.tensor import adopt

_PRIORITY = 1  # before torch's own, the first of which is 10


def install(patches: Patches) -> None:
    """Teach torch's serialization the emulated device until `patches` is undone."""
    entry = (_PRIORITY, _tag, _restore)
    registry = torch.serialization._package_registry
    registry.insert(0, entry)
    patches.on_undo(lambda: registry.remove(entry))
    rebuild = torch._utils._rebuild_tensor

    def rebuild_tensor(storage: Any, *args: Any) -> Any:
        out = rebuild(storage, *args)  # type: ignore[no-untyped-call]
        return adopt(out) if is_device(storage) else out

    patches.set(torch._utils, "_rebuild_tensor", rebuild_tensor)
    patches.set(torch.UntypedStorage, "cuda", _storage_to_device)


def _tag(storage: Any) -> str | None:
    return "cuda:0" if is_device(storage) else None


def _restore(storage: Any, location: str) -> Any:
    if not location.startswith("cuda"):
        return None
    border.cross("h2d_pageable")
    mark_device(storage)
    return storage


def _storage_to_device(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
    """`map_location=lambda storage, location: storage.cuda(0)`."""
    border.cross("h2d_pageable")
    mark_device(storage)
    return storage
