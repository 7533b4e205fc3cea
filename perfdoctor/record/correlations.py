"""Links between host calls and device work, made unique.

Correlation ids repeat across profiler cycles, ROCm files give the id of the op instead, which several launches share,
and a CUDA graph's kernels share the one of their launch. Afterwards every call has its own id, and every piece of work
carries that of the call which launched it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.capture import CallKind, WorkKind

Ints = NDArray[np.int64]
Columns = dict[str, Ints]

_LAUNCHERS = {
    WorkKind.KERNEL: (CallKind.LAUNCH, CallKind.GRAPH_LAUNCH),
    WorkKind.MEMCPY: (CallKind.MEMCPY, CallKind.GRAPH_LAUNCH),
    WorkKind.MEMSET: (CallKind.MEMSET, CallKind.GRAPH_LAUNCH),
    WorkKind.GRAPH: (CallKind.GRAPH_LAUNCH,),
}


def fill_external(calls: Columns, work: Columns) -> bool:
    """Use the external id as correlation where the file has no correlations at all. True where it did."""
    if (calls["correlation"] > 0).any() or (work["correlation"] > 0).any():
        return False
    calls["correlation"], work["correlation"] = calls["external"], work["external"]
    return True


def make_unique(calls: Columns, work: Columns, stream_syncs: Columns) -> int:
    """Give repeated correlations of calls ids of their own, in place. Returns how many calls were renumbered.

    Where an id names several calls, work goes to the calls in time order: the k-th piece to the k-th call where there
    are as many calls that can have launched it, else to the last such call before it.
    """
    for table in (calls, work):
        table["correlation"] = np.where(table["correlation"] <= 0, -1, table["correlation"])
    old = calls["correlation"]
    order = np.lexsort((calls["start_ns"], old))
    repeated = np.zeros(len(old), bool)
    repeated[order[1:]] = (old[order[1:]] == old[order[:-1]]) & (old[order[1:]] >= 0)
    if not repeated.any():
        return 0
    new = old.copy()
    new[repeated] = int(max(old.max(), work["correlation"].max(initial=0))) + 1 + np.arange(int(repeated.sum()))
    shared = np.unique(old[repeated])
    for kind, launchers in _LAUNCHERS.items():
        can = np.isin(calls["kind"], launchers) & np.isin(old, shared)
        rows = (work["kind"] == kind) & np.isin(work["correlation"], shared)
        _relabel(work, rows, old, new, calls["start_ns"], can, in_order=True)
    everything = np.isin(old, shared)
    if stream_syncs:
        rows = np.isin(stream_syncs["correlation"], shared)
        _relabel(stream_syncs, rows, old, new, calls["start_ns"], everything, in_order=False)
        records = everything & (calls["kind"] == CallKind.EVENT_RECORD)
        rows = np.isin(stream_syncs["record_correlation"], shared)
        _relabel(stream_syncs, rows, old, new, calls["start_ns"], records, in_order=False, column="record_correlation")
    calls["correlation"] = new
    return int(repeated.sum())


def _relabel(
    table: Columns,
    rows: NDArray[np.bool_],
    old: Ints,
    new: Ints,
    call_start: Ints,
    can: NDArray[np.bool_],
    *,
    in_order: bool,
    column: str = "correlation",
) -> None:
    """Replace `table[column][rows]` by the new id of the call that fits in time, among the calls that `can`."""
    index, callers = np.flatnonzero(rows), np.flatnonzero(can)
    if not len(index) or not len(callers):
        return
    index = index[np.lexsort((table["start_ns"][index], table[column][index]))]
    callers = callers[np.lexsort((call_start[callers], old[callers]))]
    keys, starts = table[column][index], table["start_ns"][index]
    caller_keys = old[callers]
    first = np.searchsorted(caller_keys, keys, side="left")
    count = np.searchsorted(caller_keys, keys, side="right") - first
    own_first = np.searchsorted(keys, keys, side="left")
    own_count = np.searchsorted(keys, keys, side="right") - own_first
    rank = np.arange(len(keys)) - own_first
    # The last call of the same key that began before the row: both sides merged in (key, time) order, calls first.
    merged = np.lexsort(
        (
            np.r_[np.zeros(len(callers)), np.ones(len(index))],
            np.r_[call_start[callers], starts],
            np.r_[caller_keys, keys],
        )
    )
    seen = np.cumsum(merged < len(callers))[np.argsort(merged)[len(callers) :]]
    before = np.clip(seen - first - 1, 0, np.maximum(count - 1, 0))
    choice = np.where((own_count == count) & in_order, rank, before)
    known = count > 0
    table[column][index[known]] = new[callers[(first + choice)[known]]]
