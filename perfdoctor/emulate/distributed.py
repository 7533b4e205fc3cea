"""torch.distributed with the "nccl" backend: gloo in its place."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from perfdoctor.emulate.patches import Patches


def install(patches: Patches) -> None:
    """Map "nccl" to "gloo" until `patches` is undone."""
    if not dist.is_available():
        return
    init, new_group = dist.init_process_group, dist.new_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return init(_mapped(backend), *args, **kwargs)

    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        if "backend" in kwargs:
            kwargs["backend"] = _mapped(kwargs["backend"])
        return new_group(*args, **kwargs)

    for owner in (dist, dist.distributed_c10d):
        patches.set(owner, "init_process_group", init_process_group)
        patches.set(owner, "new_group", new_process_group)
        patches.set(owner, "is_nccl_available", lambda: True)


def _mapped(backend: Any) -> Any:
    return "gloo" if isinstance(backend, str) and "nccl" in backend else backend
