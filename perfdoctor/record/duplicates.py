"""Rows that are in a file twice: two exports joined, a table beside its newer version, a view of it.

Two pieces of work cannot run on one stream from and to the same nanosecond, nor two calls on one thread. Ops can: they
nest, and short ones often last as long as the op around them. So only a file that repeats work or calls is searched.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.capture import CallKind, Ints, Note

Table = dict[str, Ints]
_SEARCHED = ("calls", "work")


def drop_duplicates(tables: dict[str, Table]) -> int:
    """Drop rows equal in every column from `calls` and `work`, and where there were any from the other tables too.

    Replaces the tables in place. Returns how many rows went. Call it before correlations are made unique.
    """
    kept = {name: ~_repeated(tables[name]) for name in _SEARCHED}
    calls, work = tables["calls"], tables["work"]
    # The nodes of a CUDA graph share stream and correlation, and two alike may run side by side, unless their launch is
    # there twice as well.
    graphs = kept["calls"] & (calls["kind"] == CallKind.GRAPH_LAUNCH)
    twice = np.isin(calls["correlation"], calls["correlation"][~kept["calls"]])
    kept["work"] |= np.isin(work["correlation"], calls["correlation"][graphs & ~twice])
    if all(bool(mask.all()) for mask in kept.values()):
        return 0
    for name in tables.keys() - kept.keys():
        kept[name] = ~_repeated(tables[name])
    for name, mask in kept.items():
        tables[name] = {column: values[mask] for column, values in tables[name].items()}
    return sum(int((~mask).sum()) for mask in kept.values())


def _repeated(table: Table) -> NDArray[np.bool_]:
    """Which rows that last are equal to an earlier row."""
    repeated = np.zeros(len(table["start_ns"]), bool)
    columns = [values for name, values in table.items() if name != "start_ns"]
    order = np.lexsort((*columns, table["start_ns"])) if _may_repeat(table) else np.empty(0, np.int64)
    if len(order) > 1:
        same = (table["end_ns"] > table["start_ns"])[order[1:]]
        for values in table.values():
            same &= values[order[1:]] == values[order[:-1]]
        repeated[order[1:]] = same
    return repeated


def _may_repeat(table: Table) -> bool:
    """Whether two rows share start and end: few do, and sorting by every column costs ten times as much."""
    starts = np.sort(table["start_ns"])
    if not (starts[1:] == starts[:-1]).any():
        return False
    order = np.lexsort((table["end_ns"], table["start_ns"]))
    starts, ends = table["start_ns"][order], table["end_ns"][order]
    return bool(((starts[1:] == starts[:-1]) & (ends[1:] == ends[:-1])).any())


def duplicates_note(number: int) -> Note:
    """The note on rows that were dropped."""
    text = f"{number} rows were in the file twice, equal in every column: counted once (two exports in one file?)"
    return Note(code="duplicate-rows", text=text, count=number)
