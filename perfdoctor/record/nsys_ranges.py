"""NVTX ranges of an Nsight export: named ranges, steps, and the ops that torch's emit_nvtx writes as ranges."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.nsys_strings import NsysStrings
from perfdoctor.record.processes import PROCESS
from perfdoctor.record.sqlite_tables import LATEST_NS, SqliteTables
from perfdoctor.record.step_ranges import range_kinds

Ints = NDArray[np.int64]
Table = dict[str, Ints]

_RANGE_TYPES = (59, 60, 70, 71)  # push-pop and start-end ranges, of the process itself and of its text files
_OF_PROCESS = (60, 71)
_COLUMNS = ("start", "end", "globalTid", "textId")
# torch.autograd.profiler.emit_nvtx: 'aten::mul, seq = 12, op_id = 34, sizes = [[2, 2]]'.
_OP = re.compile(r"^([^,]+), (?:seq|op_id|sizes|input_op_ids) = ")
_OP_NAME = re.compile(r"^(?:aten|autograd|c10d|torch|prims)::")


def read_ranges(
    tables: SqliteTables, strings: NsysStrings, last_ns: int
) -> tuple[Table, Table, Ints, NDArray[np.bool_], int]:
    """(ranges with kind, ops, step numbers of the ranges, which ranges were never closed, how many have no start).

    What was never closed ends at `last_ns`.
    """
    raw = tables.integers("NVTX_EVENTS", (*_COLUMNS, "eventType"), f"WHERE eventType IN {_RANGE_TYPES} ORDER BY rowid")
    texts = _texts(tables, raw["textId"], strings)
    placed = (raw["start"] > -LATEST_NS) & (raw["start"] < LATEST_NS)
    texts = [text for text, known in zip(texts, placed.tolist(), strict=True) if known]
    raw = {column: values[placed] for column, values in raw.items()}
    name = np.array([strings.table[op or text] for text, op in texts], np.int64)
    is_op = np.array([op is not None for _, op in texts], bool)
    unclosed = (raw["end"] < raw["start"]) | (raw["end"] >= LATEST_NS)  # NULL among them
    end = np.where(unclosed, np.maximum(last_ns, raw["start"]), raw["end"])
    table = {"start_ns": raw["start"], "end_ns": end, "thread": raw["globalTid"], "name": name}
    ops = {column: values[is_op] for column, values in table.items()}
    ranges = {column: values[~is_op] for column, values in table.items()}
    # Start-end ranges belong to the process: a step of theirs may begin on any thread.
    owner = np.where(np.isin(raw["eventType"], _OF_PROCESS), raw["globalTid"] & PROCESS, raw["globalTid"])
    ranges["kind"], numbers = range_kinds(strings.strings, ranges["name"], owner[~is_op])
    return ranges, ops, numbers, unclosed[~is_op], int((~placed).sum())


def _texts(tables: SqliteTables, ids: Ints, strings: NsysStrings) -> list[tuple[str, str | None]]:
    """(text, op name or None) of every range: inline where the row has it, else behind textId."""
    inline: list[object] = []
    for name in tables.versions("NVTX_EVENTS"):
        column = "text" if "text" in tables.columns_of(name) else "NULL"
        query = f'SELECT {column} FROM "{name}" WHERE eventType IN {_RANGE_TYPES} ORDER BY rowid'
        inline += [row[0] for row in tables.rows(query)]
    registered = strings.texts(np.unique(ids))
    found = [registered.get(i, "") if text is None else str(text) for text, i in zip(inline, ids.tolist(), strict=True)]
    return [(text, op_name(text)) for text in found]


def op_name(text: str) -> str | None:
    """The op that a range of emit_nvtx stands for; None for other ranges."""
    match = _OP.match(text)
    if match:
        return match[1]
    return text if _OP_NAME.match(text) else None
