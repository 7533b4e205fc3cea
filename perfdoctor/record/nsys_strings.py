"""Text of an Nsight export: looked up by id, interned only where a row uses it.

StringIds also holds the environment of every process of the recording machine; what no row of a table names stays out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from perfdoctor.record.sqlite_tables import SqliteTables
from perfdoctor.record.string_table import StringTable

Ints = NDArray[np.int64]


class NsysStrings:
    """`names` turns a column of StringIds ids into indices of `strings`."""

    def __init__(self, tables: SqliteTables) -> None:
        self._tables = tables
        self.table = StringTable()

    @property
    def strings(self) -> list[str]:
        return self.table.strings

    def names(self, ids: Ints, spell: Callable[[str], str] = str) -> Ints:
        """The names behind ids, spelt by `spell`; an id without a string is ''. Shapes (n,) -> (n,)."""
        used, inverse = np.unique(ids, return_inverse=True)
        texts = self.texts(used)
        indices = np.array([self.table[spell(texts.get(int(i), ""))] for i in used], np.int64)
        return indices[inverse] if len(used) else np.empty(0, np.int64)

    def texts(self, used: Ints) -> dict[int, str]:
        """The strings behind ids."""
        wanted = set(used.tolist())
        found: dict[int, str] = {}
        for name in self._tables.versions("StringIds"):
            for index, value in self._tables.rows(f'SELECT id, value FROM "{name}"'):
                if index in wanted and isinstance(index, int):
                    found[index] = str(value)
        return found
