"""Statistics from the second call on: the table, names and columns of a list of (name, parameter) pairs are kept.

As everywhere, what is kept is compared with the addresses of now before anything is launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perfdoctor.kernels import launch_route, pointer_table, walker
from perfdoctor.kernels.pointer_table import GradTable

Pairs = list[tuple[str, Tensor]]
_KEPT_LISTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsTable:
    """What one list of pairs needs."""

    all_names: tuple[str, ...]
    names: tuple[str, ...]
    """of the parameters that have a gradient"""
    walk: Any
    table: GradTable
    columns: tuple[int, ...] | None
    """the table's column for each name, where a gradient has several; None where they are the same"""


_recent: dict[tuple[int, int, int], StatsTable] = {}


def find(pairs: Pairs, kernel: str | None) -> StatsTable | None:
    """The verified table of these pairs; None where a kernel cannot read them all where they lie."""
    if kernel == "torch" or not pairs or not (is_pair(pairs[0]) and is_pair(pairs[-1])):
        return None
    key = (len(pairs), id(pairs[0][1]), id(pairs[-1][1]))
    recent = _recent.get(key)
    if recent is not None and _still_right(recent, pairs, kernel):
        return recent
    found = _prepare(pairs, kernel)
    if found is not None and not pointer_table.is_capturing(found.table.device):
        if len(_recent) >= _KEPT_LISTS:
            _recent.clear()
        _recent[key] = found
    return found


def is_pair(pair: object) -> bool:
    """Whether that is a name and a tensor."""
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)


def forget() -> None:
    """Lets go of all tables."""
    _recent.clear()


def _still_right(recent: StatsTable, pairs: Pairs, kernel: str | None) -> bool:
    device = recent.table.device
    if not launch_route.uses_table(device, kernel):
        return False
    if pointer_table.current_stream(device) != recent.table.stream or pointer_table.is_capturing(device):
        return False
    matching: bool = recent.walk.matches_pairs(pairs, recent.all_names)
    return matching


def _prepare(pairs: Pairs, kernel: str | None) -> StatsTable | None:
    if not all(is_pair(pair) for pair in pairs):
        return None
    items = [item for _, item in pairs]
    device = launch_route.table_device(items, False, kernel)
    rows = walker.gather_rows(items, False) if device is not None else None
    if device is None or rows is None or pointer_table.device_of(rows) != device:
        return None
    present = rows[:, 2] != walker.NO_GRADIENT
    once = rows.clone()
    once[present, 2] |= walker.OF_PARAMETER  # the same memory under two names is read once, a parameter's or not
    table = launch_route.TABLES.find([], False, once, device)
    names = tuple(name for name, _ in pairs)
    if table.is_empty:
        return None
    return StatsTable(
        all_names=names,
        names=tuple(name for name, has_gradient in zip(names, present.tolist(), strict=True) if has_gradient),
        walk=walker.walk_of(rows),
        table=table,
        columns=_columns_of(once[present]),
    )


def _columns_of(rows: Tensor) -> tuple[int, ...] | None:
    """The column of each row in a table that holds repeated ones once."""
    first: dict[tuple[int, ...], int] = {}
    columns: list[int] = []
    for number, row in enumerate(rows.tolist()):
        key = tuple(row) if row[1] else (number,)
        columns.append(first.setdefault(key, len(first)))
    return None if len(first) == len(columns) else tuple(columns)


def in_order(table: Tensor, columns: tuple[int, ...]) -> Tensor:
    """[..., n + 1]: the columns once for each name, then the total."""
    parts, start = [], 0
    for stop in range(1, len(columns) + 1):
        if stop == len(columns) or columns[stop] != columns[stop - 1] + 1:
            parts.append(table[..., columns[start] : columns[stop - 1] + 1])
            start = stop
    return torch.cat([*parts, table[..., -1:]], dim=-1)
