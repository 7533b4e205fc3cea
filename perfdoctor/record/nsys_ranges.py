"""NVTX ranges of an Nsight export: named ranges, steps, and the ops that torch's emit_nvtx writes as ranges."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.nsys_strings import NsysStrings
from perfdoctor.record.sqlite_tables import SqliteTables
from perfdoctor.record.step_ranges import range_kinds

Ints = NDArray[np.int64]
Table = dict[str, Ints]

_RANGE_TYPES = (59, 60, 70, 71)  # push-pop and start-end ranges, of the process itself and of its text files
_COLUMNS = ("start", "end", "globalTid", "textId")
# torch.autograd.profiler.emit_nvtx: 'aten::mul, seq = 12, op_id = 34, sizes = [[2, 2]]'.
_OP = re.compile(r"^([^,]+), (?:seq|op_id|sizes|input_op_ids) = ")
_OP_NAME = re.compile(r"^(?:aten|autograd|c10d|torch|prims)::")


def read_ranges(
    tables: SqliteTables, strings: NsysStrings, last_ns: int
) -> tuple[Table, Table, Ints, NDArray[np.bool_]]:
    """(ranges with kind, ops, step numbers of the ranges, which ranges were never closed). These end at `last_ns`."""
    raw = tables.integers("NVTX_EVENTS", _COLUMNS, f"WHERE eventType IN {_RANGE_TYPES} ORDER BY rowid")
    texts = _texts(tables, raw["textId"], strings)
    name = np.array([strings.table[op or text] for text, op in texts], np.int64)
    is_op = np.array([op is not None for _, op in texts], bool)
    end = np.where(raw["end"] < 0, np.maximum(last_ns, raw["start"]), raw["end"])
    table = {"start_ns": raw["start"], "end_ns": end, "thread": raw["globalTid"], "name": name}
    ops = {column: values[is_op] for column, values in table.items()}
    ranges = {column: values[~is_op] for column, values in table.items()}
    ranges["kind"], numbers = range_kinds(strings.strings, ranges["name"], ranges["thread"])
    return ranges, ops, numbers, (raw["end"] < 0)[~is_op]


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
