"""Whether the tables of a saved recording fit together: indices name what is there, times are times."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from perfdoctor.record.tables import Columns, Ints

# What lies between any two times must fit an int64.
_EARLIEST_NS, _LATEST_NS = -(1 << 61), 1 << 62
_TIMES = ("start_ns", "end_ns", "time_ns")


def check_tables(tables: Mapping[str, Columns], num_strings: int, num_sites: int) -> None:
    """Raises ValueError, which names the column, where an index or a time is out of range. -1 is 'unknown'."""
    for table, rows in tables.items():
        for column, values in rows.columns().items():
            if column in _TIMES:
                _check_range(f"{table}.{column}", values, _EARLIEST_NS, _LATEST_NS)
            elif column == "name" or (table, column) == ("hits", "kind"):
                _check_range(f"{table}.{column}", values, -1, num_strings)
            elif column == "site":
                _check_range(f"{table}.{column}", values, -1, num_sites)


def _check_range(name: str, values: Ints, low: int, high: int) -> None:
    if len(values) and not (low <= int(values.min()) and int(values.max()) < high):
        raise ValueError(f"{name} holds {int(values.min())} to {int(values.max())}, outside {low} to {high - 1}")


def check_strings(value: object) -> tuple[str, ...]:
    """The names of a recording; ValueError where they are no list of text."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError("strings is no list of text")
    return tuple(value)


def check_column(values: np.ndarray) -> Ints:  # type: ignore[type-arg]
    """A column as it was saved; ValueError where it is no row of whole numbers."""
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"a column of {values.ndim} dimensions and type {values.dtype}")
    return values.astype(np.int64)
