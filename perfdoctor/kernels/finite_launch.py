"""Launches that check gradients and loss: the first over a table that was just verified, the next by one call.

That one call reads where every gradient lies now, compares it with what the table was built for, and only then
launches; in Python the same steps take longer than the kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from perfdoctor.kernels import kernel_launch, pointer_table, stats_table
from perfdoctor.kernels.metrics_launch import SPAN, Launcher, as_loss, excuse_mode, is_plain
from perfdoctor.kernels.stats_table import Pairs, StatsTable
from perfdoctor.kernels.walker import compiled_walker
from perfdoctor.kernels.work_list import TILE

Names = tuple[str, ...]
_SIZES = (8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4)
_LOSS, _NOTE_LOSS = 6, 4  # where `finite_kernel` and `nonfinite_kernel` take loss, excuse and check
_NUM_WARPS = 8
_KEPT_TABLES = 8  # of one list: an allocator may give gradients a few places in turn
_KEPT_LISTS = 64


@functools.cache
def _kernel() -> Any:
    from perfdoctor.kernels import finite_triton

    return finite_triton.finite_kernel


class Checks:
    """The checks of one record int64 [RECORD], and of `found` float32 [] beside it (see `metrics_reference`)."""

    def __init__(self, record: Tensor, found: Tensor, kernel: str | None) -> None:
        """`kernel`: "triton" (None means it on a GPU), "cuda" (the gradients are counted by it) or "torch"."""
        self._record, self._found, self._kernel = record, found, kernel
        self._launcher = Launcher(record, None if kernel == "cuda" else kernel)
        self._no_counts = torch.zeros(0, dtype=torch.int64, device=record.device)
        self._kept: dict[Any, list[tuple[Any, Names, Any]]] = {}
        self.num_prepared = 0
        """launches that were prepared anew; while it grows, gradients move from step to step"""

    def repeat(self, pairs: Pairs, loss: Any, excuse: Tensor | None, is_scale: bool, check: int) -> Names | None:
        """Checks as an earlier call did, if all is as it was then; gives the names of the gradients, else None.

        `pairs`: of all parameters, by name; [] for a loss alone. Arguments as those of `run`.
        """
        stream = self._launcher.stream()
        kept = self._kept.get(self._key(stream, pairs, loss, excuse, is_scale))
        if kept is None:
            return None
        for place, (launch, names, _) in enumerate(kept):
            if launch.run(stream, pairs, loss, excuse, check):
                if place:
                    kept.insert(0, kept.pop(place))
                return names
        return None

    def find(self, pairs: Pairs) -> StatsTable | None:
        """The verified table of these pairs, where one launch can check them all; else None."""
        if not self._launcher.is_triton or self._kernel == "cuda":
            return None
        found = stats_table.find(pairs, self._kernel)
        if found is None or found.columns is not None or found.table.device != self._record.device:
            return None
        return found

    def run(self, found: StatsTable, pairs: Pairs, loss: Tensor | None, excuse: Tensor | None, is_scale: bool,
            check: int) -> None:  # fmt: skip
        """One launch for loss and gradients: counts, and `metrics_reference.note_nonfinite` of them."""
        table = found.table
        with table.lock:
            counts = pointer_table.zero_counts(table)
            read = as_loss(loss)
            is_float32 = table.work.element == 0
            grid = table.programs(3 if is_float32 else 2, table.work.num_slots)  # as for the statistics
            arguments = (table.slots, table.first_part, counts, table.counter, self._record, self._found,
                         self._record if read is None else read, self._record if excuse is None else excuse, check,
                         table.work.num_slots, len(table.work.num_elements))  # fmt: skip
            constants = {"DTYPE": table.work.element, "HAS_LOSS": read is not None,
                         "EXCUSE": excuse_mode(excuse, is_scale), "TILE": TILE, "SPAN": SPAN}  # fmt: skip
            compiled = kernel_launch.launch(_kernel(), table.device, grid, arguments, constants, _NUM_WARPS,
                                            80 if is_float32 else 128)  # fmt: skip
        launch = kernel_launch.prepare(compiled, table.device, grid, arguments, _SIZES)
        self._keep(launch, _LOSS, found, pairs, loss, excuse, is_scale)

    def note(self, counts: Tensor | None, loss: Tensor | None, excuse: Tensor | None, is_scale: bool,
             check: int) -> None:  # fmt: skip
        """The same for counts that are there already; None for a loss alone."""
        here = self._no_counts if counts is None else counts
        launch = self._launcher.note_nonfinite(self._found, loss, excuse, is_scale, here, check)
        if counts is None:
            self._keep(launch, _NOTE_LOSS, None, [], loss, excuse, is_scale)

    def take(self, snapshot: Tensor) -> None:
        """See `metrics_reference.take`."""
        self._launcher.take(snapshot, self._found)

    def _keep(self, launch: Any, first: int, found: StatsTable | None, pairs: Pairs, loss: Tensor | None,
              excuse: Tensor | None, is_scale: bool) -> None:  # fmt: skip
        """Prepares what repeats a launch; not for one in a graph capture, whose table is the graph's."""
        module = compiled_walker() if launch is not None else None
        is_copy = loss is not None and not is_plain(loss)  # the kernel was compiled for the copy's type
        if module is None or is_copy or pointer_table.is_capturing(self._record.device):
            return
        index = -1 if self._record.device.type == "cpu" else self._record.device.index
        names, walk, table = ((), None, None) if found is None else (found.all_names, found.walk, found.table)
        checked = module.CheckLaunch(launch, first, index, loss, excuse, walk, names)
        if len(self._kept) >= _KEPT_LISTS:
            self._kept.clear()
        kept = self._kept.setdefault(self._key(self._launcher.stream(), pairs, loss, excuse, is_scale), [])
        kept[:] = [
            (checked, () if found is None else found.names, table),
            *(row for row in kept if row[2] is not table),
        ]
        del kept[_KEPT_TABLES:]
        self.num_prepared += 1

    def _key(self, stream: int, pairs: Pairs, loss: Any, excuse: Tensor | None, is_scale: bool) -> tuple[Any, ...]:
        """What a launch depends on beside the gradients, which it compares itself."""
        is_list = id(pairs) if pairs else 0
        return stream, is_list, getattr(loss, "dtype", None), None if excuse is None else excuse.dtype, is_scale
