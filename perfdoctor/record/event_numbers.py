"""Numbers of events to arrays of int64: times without rounding, integers whatever form they have."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.event_rows import Event, ExactEvent

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_LONGEST_US = 1e14  # three years: a row that long was never closed
_EXACT_US = float(1 << 43)  # from here on a float64 of microseconds no longer tells nanoseconds apart
_UNKNOWN = -(1 << 62)
_LARGEST_US = 2.3e15  # 73 years: with a clock's base added, int64 nanoseconds hold what lies between any two


def is_rounded(ts: float) -> bool:
    """Whether a time in microseconds is too large for its fraction to be whole nanoseconds in a float64."""
    return _EXACT_US <= ts < _LARGEST_US and ts != math.floor(ts)


def is_time(ts: Any) -> bool:
    """Whether a value is a time that nanoseconds in int64 can hold."""
    return _decimal_ns(ts) != _UNKNOWN


def times(rows: list[Event]) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Starts, ends and which rows have a usable time. A row with start and duration 0 was opened and never closed."""
    duration = np.array([row.dur for row in rows], np.float64)
    if isinstance(rows[0], ExactEvent):
        start = np.array([_decimal_ns(row.ts) for row in rows], np.int64)
        known = start != _UNKNOWN
    else:
        microseconds = np.array([row.ts for row in rows], np.float64)
        known = np.abs(microseconds) < _LARGEST_US  # false for NaN
        start = _nanoseconds(microseconds if known.all() else np.where(known, microseconds, 0.0))
    keep = known & (duration >= 0) & (duration < _LONGEST_US) & ((start != 0) | (duration > 0))
    return start, start + _nanoseconds(duration if keep.all() else np.where(keep, duration, 0.0)), keep


def _nanoseconds(microseconds: Floats) -> Ints:
    # Whole and fraction apart: a product of 1.7e18 would be off by up to 128 ns in float64.
    whole = microseconds.astype(np.int64)
    fraction: Ints = np.rint((microseconds - whole) * 1000.0).astype(np.int64)
    return whole * 1000 + fraction


def exact_us(ts: Any) -> Decimal | None:
    """A time in microseconds as it is written; None where it is none that nanoseconds in int64 can hold."""
    try:
        number = Decimal(ts)
        return number if abs(number) < _LARGEST_US else None
    except (ArithmeticError, TypeError, ValueError):
        return None


def _decimal_ns(ts: Any) -> int:
    number = exact_us(ts)
    return _UNKNOWN if number is None else round(number * 1000)


def integers(values: list[Any], default: int = -1) -> Ints:
    """Numbers, or text that is one, as int64; `default` for everything else. Shape (len(values),)."""
    try:
        column = np.array(values, np.int64)
        if column.ndim == 1:  # else a value is a list
            return column
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([_integer(value, default) for value in values], np.int64)


def _integer(value: Any, default: int) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return default
    if number >= 1 << 63:  # written as unsigned: -1 as 18446744073709551615
        number -= 1 << 64
    return number if abs(number) < 1 << 63 else default
