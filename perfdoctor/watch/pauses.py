"""Moments in which the host did nothing for the loop."""

from __future__ import annotations

from typing import NamedTuple


class Pause(NamedTuple):
    """One pause on the Unix clock. `amount` is what it dealt with (objects, samples), -1 where it has none."""

    start_ns: int
    end_ns: int
    thread: int
    name: str  # 'gc:0' to 'gc:2', 'data', 'eval-data', 'worker-start'
    amount: int
