"""Python frames from the call stacks that traces of 2021 keep in the arguments of ops.

A stack is text, innermost first: `train.py(41): step;train.py(90): main`. Here, unlike in `python_function` rows, the
line is the one that was running. Neighbouring ops share their outer frames, so a frame lasts from the first op that
names it to the last one in a row.
"""

from __future__ import annotations

from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.string_table import StringTable

Ints = NDArray[np.int64]

StackPart = tuple[list[Ints], list[tuple[int, ...]]]

_COLUMNS = ("start_ns", "end_ns", "thread", "name")


class CallStacks:
    """Collects (start, end, thread, stack) of ops; `frames` merges them into spans, outer frames first."""

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._ids: dict[str, int] = {}
        self._stacks: list[tuple[int, ...]] = []
        self._rows: list[Ints] = []
        self._shared_frames: dict[tuple[int, int], int] = {}

    def add(self, stacks: list[object], columns: dict[str, Ints], keep: NDArray[np.bool_]) -> None:
        """Note the stacks of a block of ops. Shapes: one entry a row."""
        ids = np.array([self._intern(stack) if isinstance(stack, str) and stack else -1 for stack in stacks], np.int64)
        chosen = keep & (ids >= 0)
        if chosen.any():
            rows = (columns["start_ns"], columns["end_ns"], columns["thread"], ids)
            self._rows.append(np.stack([column[chosen] for column in rows], axis=1))

    def _intern(self, stack: str) -> int:
        index = self._ids.get(stack)
        if index is None:
            index = self._ids[stack] = len(self._stacks)
            names = (name.strip() for name in reversed(stack.split(";")))
            self._stacks.append(tuple(self._strings[name] for name in names if name))
        return index

    def part(self) -> StackPart:
        """What another collection can take in: rows, and the stacks that their ids stand for."""
        return self._rows, self._stacks

    def merge(self, part: StackPart, names: Ints) -> None:
        """Take in what another collection gathered; `names` translates its names."""
        rows, stacks = part
        offset = len(self._stacks)
        self._stacks += [tuple(names[list(stack)].tolist()) for stack in stacks]
        self._rows += [row + np.array([0, 0, 0, offset]) for row in rows]

    def frames(self) -> dict[str, Ints]:
        """Columns start_ns, end_ns, thread, name; empty where no op had a stack."""
        rows = np.concatenate(self._rows) if self._rows else np.empty((0, 4), np.int64)
        rows = rows[np.lexsort((-rows[:, 1], rows[:, 0], rows[:, 2]))]
        spans: list[list[int]] = []  # outer frames before inner ones
        opened: list[list[int]] = []
        thread, last = -1, -1
        for start, end, row_thread, stack in rows.tolist():
            kept = self._shared(last, stack) if row_thread == thread else 0
            _close(opened, kept)
            added = [[start, end, row_thread, name] for name in self._stacks[stack][kept:]]
            spans += added
            opened += added
            if opened:
                opened[-1][1] = max(opened[-1][1], end)
            thread, last = row_thread, stack
        _close(opened, 0)
        table = np.array(spans, np.int64).reshape(-1, 4)
        return {column: np.ascontiguousarray(table[:, i]) for i, column in enumerate(_COLUMNS)}

    def _shared(self, left: int, right: int) -> int:
        """How many outer frames two stacks have in common."""
        if left == right:
            return len(self._stacks[right])
        known = self._shared_frames.get((left, right))
        if known is None:
            pairs = zip(self._stacks[left], self._stacks[right], strict=False)
            known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._shared_frames[left, right] = known
        return known


def _close(opened: list[list[int]], kept: int) -> None:
    """Close all but the outermost `kept` frames; a frame lasts at least as long as those inside it."""
    while len(opened) > kept:
        end = opened.pop()[1]
        if opened:
            opened[-1][1] = max(opened[-1][1], end)
