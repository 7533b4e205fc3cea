"""The memory that is free, and the sizes that fit into it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from perfdoctor.errors import UsageError
from perfdoctor.units import format_bytes

_USED_SHARE = 0.8  # of what is free: cuBLAS's workspace and the caching allocator's rounding need some too


def free_bytes(device: str) -> int:
    """Bytes that may be allocated on "cuda" or "cpu" now; a control group's limit counts on the CPU."""
    if device == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info()
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(free + cached)
    return min(_available(), _group_headroom())


def fitting(
    what: str, sizes: Sequence[int], needed_bytes: Callable[[int], int], device: str, free: int | None = None
) -> tuple[list[int], list[str]]:
    """The sizes that fit into the free memory, and a sentence for each that does not.

    Raises:
        UsageError: none fits.
    """
    free = free_bytes(device) if free is None else free
    kept = [size for size in sizes if needed_bytes(size) <= _USED_SHARE * free]
    notes = [
        f"{what} {size} left out: it needs {format_bytes(needed_bytes(size))}, "
        f"{format_bytes(free)} are free on the {_spoken(device)}"
        for size in sizes
        if size not in kept
    ]
    if not kept:
        raise UsageError(f"not enough memory: {notes[0]}; free some, or choose smaller sizes")
    return kept, notes


def _spoken(device: str) -> str:
    return "GPU" if device == "cuda" else "CPU"


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):  # no sysconf: Windows
        return 4 << 30


def _group_headroom() -> int:
    group = Path("/sys/fs/cgroup")
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return max(0, int((group / limit).read_text()) - int((group / usage).read_text()))
        except (OSError, ValueError):  # "max": no limit
            continue
    return 1 << 62
