"""torch.distributed with the "nccl" backend: gloo in its place, and a barrier is a wait of the host, as with NCCL."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.distributed as dist

from perfdoctor.emulate import border
from perfdoctor.emulate.patches import Patches
from perfdoctor.record.call_site import own_frame
from perfdoctor.record.library_kinds import barrier_kind


def install(patches: Patches) -> None:
    """Map "nccl" to "gloo" until `patches` is undone."""
    multiprocessing: Any = torch.multiprocessing
    patches.set(multiprocessing, "spawn", functools.partial(_spawned, multiprocessing.spawn))
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

    wait = dist.barrier

    @functools.wraps(wait)
    def barrier(*args: Any, **kwargs: Any) -> Any:
        border.cross(barrier_kind(own_frame(sys._getframe(1))))
        return wait(*args, **kwargs)

    for owner in (dist, dist.distributed_c10d):
        patches.set(owner, "barrier", barrier)
        patches.set(owner, "init_process_group", init_process_group)
        patches.set(owner, "new_group", new_process_group)
        patches.set(owner, "is_nccl_available", lambda: True)


def _spawned(
    original: Any, fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *rest: Any, **kwargs: Any
) -> Any:
    """One process for the one device runs in this process: a new one would see no emulated device."""
    if nprocs != 1 or not join:
        return original(fn, args, nprocs, join, *rest, **kwargs)
    fn(0, *args)
    return None


def _mapped(backend: Any) -> Any:
    return "gloo" if isinstance(backend, str) and "nccl" in backend else backend
