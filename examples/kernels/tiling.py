"""How a Triton kernel over a flat array is laid out: block length, warps, grid and what the caches are told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """One choice. `str()` of it is its line in the table of `--tune`."""

    block: int = 4096
    """elements a program works on at a time"""
    num_warps: int = 8
    programs: int | None = None
    """programs a multiprocessor, which take blocks in turn; None: one program a block"""
    load: str = ""
    """the loads' eviction policy; "evict_first", though nothing is read again, costs 4 to 10 % on an H200"""
    store: str = ""
    """the stores' cache modifier; ".cs", cache streaming, changes nothing there"""

    def grid(self, blocks: int, device: torch.device) -> tuple[int]:
        """The number of programs for so many blocks."""
        return (num_programs(blocks, self.programs, device),)

    def __str__(self) -> str:
        grid = "a program a block" if self.programs is None else f"{self.programs} programs an SM"
        return f"block {self.block}, {self.num_warps} warps, {grid}, load {self.load or '-'}, store {self.store or '-'}"


def num_programs(pieces: int, programs: int | None, device: torch.device) -> int:
    """One program a piece of work, or `programs` a multiprocessor where those are fewer."""
    if programs is None or device.type != "cuda":
        return pieces
    return min(pieces, programs * torch.cuda.get_device_properties(device).multi_processor_count)


def tilings() -> Iterator[Tiling]:
    """A small set to choose from by measurement."""
    for block, warps in ((1024, 4), (2048, 8), (4096, 8), (8192, 8), (8192, 16)):
        yield Tiling(block=block, num_warps=warps)
    yield Tiling(programs=8)
    yield Tiling(load="evict_first")
    yield Tiling(store=".cs")


LAUNCHES = ((128, 1), (128, 4), (256, 1), (256, 2), (256, 4), (512, 4))
"""The same for the CUDA C++ kernels: threads a block, 16-byte vectors a thread."""
