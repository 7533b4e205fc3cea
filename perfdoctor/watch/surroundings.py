"""The machine, the versions and the settings that a loop ran with. No environment variable is kept."""

from __future__ import annotations

import gc
import math
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from perfdoctor.record.capture import Environment, Note
from perfdoctor.record.note_codes import HAS
from perfdoctor.units import format_plural
from perfdoctor.version import VERSION
from perfdoctor.watch.clocks import cuda_active
from perfdoctor.watch.garbage import froze_objects


def read_environment(loader: Any, optimizers: list[Any], sync_debug_mode: int) -> Environment:
    """What is known now. `loader` is a DataLoader or its iterator, or None."""
    torch: Any = sys.modules["torch"]
    rank, world_size = _ranks(torch)
    return Environment(
        torch=torch.__version__,
        python=platform.python_version(),
        perfdoctor=VERSION,
        cuda=torch.version.cuda or torch.version.hip or "",
        rank=rank,
        world_size=world_size,
        anomaly_mode=bool(torch.is_anomaly_enabled()),
        launch_blocking=os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0") if cuda_active() else None,
        sync_debug_mode=sync_debug_mode if cuda_active() else None,
        num_cpus=usable_cpus(),
        fused_optimizer=_fused(optimizers),
        **_loader_facts(loader),
        **(_gpu_facts(torch) if cuda_active() else {}),
    )


def describe_optimizers(optimizers: list[Any]) -> list[Note]:
    """One note an optimizer: its class, how many groups and tensors it walks, and the implementation asked for."""
    notes = []
    for optimizer in optimizers:
        groups = optimizer.param_groups
        tensors = sum(len(group["params"]) for group in groups)
        flags = ", ".join(
            f"{name}={groups[0][name]}" for name in ("fused", "foreach", "capturable") if name in groups[0]
        )
        counts = f"{format_plural(len(groups), 'parameter group')}, {format_plural(tensors, 'tensor')}"
        text = f"{type(optimizer).__name__}: {counts}, {flags or 'no flags'}"
        notes.append(Note(code="optimizer", text=text, count=len(groups)))
    return notes


def describe_settings(loader: Any, prefetched: bool) -> list[Note]:
    """What the loop has already of what a report might advise: one note each, `has-` and the name of the treatment."""
    torch: Any = sys.modules["torch"]
    persistent = getattr(loader, "persistent_workers", getattr(loader, "_persistent_workers", False))
    found = {
        "prefetch": (prefetched, "batches come through a DevicePrefetcher"),
        "persistent_workers": (persistent is True, "the DataLoader's workers persist"),
        "gc_frozen": (froze_objects() or not gc.isenabled(), "Python's garbage collector is held off"),
        "tf32": (cuda_active() and _allows_tf32(torch), "TF32 is allowed in matrix products"),
    }
    return [Note(code=HAS + name, text=text) for name, (there, text) in found.items() if there]


def _allows_tf32(torch: Any) -> bool:
    try:
        return torch.get_float32_matmul_precision() in ("high", "medium")
    except RuntimeError:  # the script mixed torch's old and new switches: then the old one cannot be read
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def usable_cpus() -> float:
    """Processors that this process may use: its affinity mask, or the quota of its control group if that is less."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    return min(count, _cgroup_quota())


def _cgroup_quota() -> float:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else math.inf
    except (OSError, ValueError):
        return math.inf


def _ranks(torch: Any) -> tuple[int | None, int | None]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None, None


def _fused(optimizers: list[Any]) -> bool | None:
    if not optimizers:
        return None
    return all(bool(group.get("fused")) for optimizer in optimizers for group in optimizer.param_groups)


def _loader_facts(loader: Any) -> dict[str, Any]:
    if loader is None:
        return {}
    # A DataLoader says num_workers, its iterator _num_workers.
    found = {
        name: getattr(loader, name, getattr(loader, "_" + name, None))
        for name in ("num_workers", "prefetch_factor", "pin_memory")
    }
    return {name: value for name, value in found.items() if isinstance(value, bool | int)}


def _gpu_facts(torch: Any) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "num_gpus": torch.cuda.device_count(),
        "driver": _driver(),
        "memory_bytes": int(properties.total_memory),
        "peak_memory_bytes": int(torch.cuda.max_memory_allocated()),
        "compute_capability": f"{properties.major}.{properties.minor}",
    }


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else ""
