"""Tables of an SQLite export as numpy columns, whatever of them a version of the exporter wrote."""

from __future__ import annotations

import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from perfdoctor.errors import BrokenTraceError

Ints = NDArray[np.int64]
SQLITE_MAGIC = b"SQLite format 3\0"
_ROWS_AT_ONCE = 1 << 16
NO_TIME = -(1 << 62)
LATEST_NS = 1 << 61  # 73 years: times count from the session's start, or from 1970
_TIMES = ("start", "end")
_JOURNALS = ("-wal", "-journal")


class SqliteTables:
    """Read access to the tables of one database. Missing tables are empty.

    Missing columns and NULL are -1, in `start` and `end` NO_TIME: a time may be negative, before the session's start.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self.names = {str(row[0]) for row in rows}

    def versions(self, table: str) -> list[str]:
        """The tables of that name; some exporters append _V2 or _V3."""
        pattern = re.compile(re.escape(table) + r"(?:_V\d+)?", re.IGNORECASE)
        return sorted(name for name in self.names if pattern.fullmatch(name))

    def columns_of(self, table: str) -> set[str]:
        """The names of a table's columns."""
        return {str(row[1]) for row in self._connection.execute(f'PRAGMA table_info("{table}")')}

    def integers(self, table: str, columns: Sequence[str], where: str = "") -> dict[str, Ints]:
        """Integer columns of all versions of a table, one after the other."""
        parts = [self._integers(name, columns, where) for name in self.versions(table)]
        if not parts:
            return {column: np.empty(0, np.int64) for column in columns}
        return {column: np.concatenate([part[:, i] for part in parts]) for i, column in enumerate(columns)}

    def _integers(self, table: str, columns: Sequence[str], where: str) -> Ints:
        present = self.columns_of(table)
        absent = {column: NO_TIME if column in _TIMES else -1 for column in columns}
        wanted = ", ".join(f'COALESCE("{c}", {absent[c]})' if c in present else str(absent[c]) for c in columns)
        cursor = self._connection.execute(f'SELECT {wanted} FROM "{table}" {where}')
        parts = [np.empty((0, len(columns)), np.int64)]
        while rows := cursor.fetchmany(_ROWS_AT_ONCE):
            try:
                parts.append(np.array(rows, np.int64))
            except (TypeError, ValueError, OverflowError) as error:
                raise sqlite3.DatabaseError(f"{table} holds something that is no number") from error
        return np.concatenate(parts)

    def rows(self, query: str) -> list[tuple[object, ...]]:
        """The rows of any query."""
        return self._connection.execute(query).fetchall()

    def count(self, table: str, where: str = "") -> int:
        """The number of rows in all versions of a table."""
        names = self.versions(table)
        return sum(int(self._connection.execute(f'SELECT COUNT(*) FROM "{n}" {where}').fetchone()[0]) for n in names)


@contextmanager
def open_tables(path: Path) -> Iterator[SqliteTables]:
    """Open a database for reading only; nothing is written beside it.

    Raises:
        BrokenTraceError: the database is cut off or damaged, now or while it is read.
    """
    missing = _missing_bytes(path)
    if missing > 0:
        raise BrokenTraceError(f"{path}: the database is cut off, {missing} bytes are missing. Export it again.")
    try:
        with _connection(path) as connection:
            connection.text_factory = lambda raw: raw.decode(errors="replace")
            yield SqliteTables(connection)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # sqlite's own message may hold the damaged bytes
        raise BrokenTraceError(
            f"{path}: the database is damaged ({error}). Export it again: nsys export --type=sqlite REPORT.nsys-rep"
        ) from error


@contextmanager
def _connection(path: Path) -> Iterator[sqlite3.Connection]:
    """The database, with what a journal beside it still holds: of a copy then, since SQLite writes to take that in."""
    journals = [path.with_name(path.name + end) for end in _JOURNALS]
    journals = [journal for journal in journals if journal.is_file() and journal.stat().st_size]
    if not journals:
        uri = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            yield connection
        return
    with tempfile.TemporaryDirectory(prefix="perfdoctor-") as folder:
        for file in (path, *journals):
            shutil.copyfile(file, Path(folder) / file.name)
        with closing(sqlite3.connect(Path(folder) / path.name)) as connection:
            yield connection


def _missing_bytes(path: Path) -> int:
    """How many bytes the file lacks of the size that its own header states."""
    with path.open("rb") as file:
        head = file.read(100)
    if len(head) < 100:
        return 100 - len(head)
    page = int.from_bytes(head[16:18], "big")
    stated = (65536 if page == 1 else page) * int.from_bytes(head[28:32], "big")
    written_by_this_version = head[24:28] == head[92:96]  # else the stated size is not kept up
    return stated - path.stat().st_size if written_by_this_version else 0
