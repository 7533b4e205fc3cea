"""Events written as a beginning and an end (`"ph": "B"` and `"E"`) to complete ones, as the other tracers write them.

Kineto writes complete events only; merged files and hand-made ones hold pairs. The file is read in blocks and by two
processes, so that pairs are made when all of it is known.
"""

from __future__ import annotations

from collections import defaultdict
from decimal import Decimal

import msgspec

from perfdoctor.record.event_numbers import exact_us
from perfdoctor.record.event_rows import NO_ARGS, Event, ExactEvent


class EventPairs:
    """Collects beginnings and ends, in the order of the file."""

    def __init__(self) -> None:
        self.halves: list[Event] = []

    def add(self, event: Event) -> None:
        """Keep one half."""
        # Raw arguments are a view: a copy lets go of the block that they are part of.
        event.args = NO_ARGS if event.args is NO_ARGS else msgspec.Raw(bytes(event.args))
        self.halves.append(event)

    def complete(self) -> tuple[list[Event], int]:
        """(complete events, how many halves have no other). On one thread what began last ends first."""
        timed = [(ts, event) for event in self.halves if (ts := exact_us(event.ts)) is not None]
        timed.sort(key=lambda half: half[0])  # stable: at one moment the order of the file counts
        opened: dict[tuple[str, str], list[tuple[Decimal, Event]]] = defaultdict(list)
        found: list[Event] = []
        for ts, event in timed:
            stack = opened[str(event.pid), str(event.tid)]
            if event.ph == "B":
                stack.append((ts, event))
            elif stack:
                begun, first = stack.pop(_place(stack, event))
                found.append(_joined(first, begun, ts))
        return found, len(self.halves) - 2 * len(found)


def _place(stack: list[tuple[Decimal, Event]], end: Event) -> int:
    """Which of the open events this ends: the last one of its name, or where it has none the last one."""
    places = (place for place in range(len(stack) - 1, -1, -1) if stack[place][1].name == end.name)
    return next(places, len(stack) - 1)


def _joined(first: Event, begun: Decimal, ended: Decimal) -> ExactEvent:
    return ExactEvent(
        ph="X", cat=first.cat, name=first.name, pid=first.pid, tid=first.tid, args=first.args,
        ts=begun, dur=float(ended - begun),
    )  # fmt: skip
