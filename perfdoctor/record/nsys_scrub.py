"""Environment variables out of an Nsight export: the file can then be shared."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from perfdoctor.errors import BrokenTraceError, NotATraceError
from perfdoctor.record.sqlite_tables import SQLITE_MAGIC

# Properties of the target, its environment among them, and files of /proc that nsys kept, `environ` among them.
_EMPTIED = re.compile(r"(?:TARGET_INFO_SYSTEM_ENV|ProcessStreams)(?:_V\d+)?", re.IGNORECASE)
_METADATA = re.compile(r"META_DATA_(?:CAPTURE|EXPORT)(?:_V\d+)?", re.IGNORECASE)
_STRINGS = re.compile(r"StringIds(?:_V\d+)?", re.IGNORECASE)
# The exporter says in a comment of the schema which columns hold ids of strings.
_REFERENCE = re.compile(r'^\s*"?(\w+)"?\s+INTEGER\b[^\n]*--[^\n]*REFERENCES\s+StringIds', re.IGNORECASE | re.MULTILINE)
_VARIABLES = re.compile(r"(?:^|\0)[A-Za-z_][A-Za-z0-9_]*=[^\0]*\0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrubbed:
    """How much was taken out."""

    num_rows: int  # of tables of the environment
    num_strings: int  # that nothing else in the file names


def scrub_export(path: Path) -> Scrubbed:
    """Take every environment variable out of an SQLite export, in place: wholly, or the file is as it was.

    Emptied are the tables of the target's properties and of the processes' own files; metadata of the environment and
    strings that no other table names are deleted, and the file is written anew, so that no free page keeps them.

    Raises:
        NotATraceError: the file is no SQLite export of Nsight Systems.
        BrokenTraceError: it is damaged.
        OSError: it cannot be read or written.
    """
    with path.open("rb") as file:
        if file.read(len(SQLITE_MAGIC)) != SQLITE_MAGIC:
            raise NotATraceError(
                f"{path}: no SQLite database. Only an export can be scrubbed: nsys export --type=sqlite REPORT.nsys-rep"
            )
    partial = path.with_name(path.name + ".part")
    try:
        shutil.copyfile(path, partial)
        with closing(sqlite3.connect(partial, isolation_level=None)) as connection:
            result = _scrub(connection, path)
        os.chmod(partial, path.stat().st_mode & 0o777)
        partial.replace(path)
    except sqlite3.DatabaseError as error:
        raise BrokenTraceError(f"{path}: the database is damaged ({error}). Export it again.") from error
    finally:
        partial.unlink(missing_ok=True)
    return result


def _scrub(connection: sqlite3.Connection, path: Path) -> Scrubbed:
    connection.text_factory = lambda raw: raw.decode(errors="surrogateescape")
    connection.execute("PRAGMA journal_mode = OFF")
    schemas = {
        str(n): str(sql) for n, sql in connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
    }
    strings = [name for name in schemas if _STRINGS.fullmatch(name)]
    if not strings:
        raise NotATraceError(f"{path}: an SQLite database, but no export of Nsight Systems (it has no table StringIds)")
    num_rows = 0
    for name in schemas:
        if _EMPTIED.fullmatch(name):
            num_rows += connection.execute(f'DELETE FROM "{name}"').rowcount
        elif _METADATA.fullmatch(name):
            num_rows += _scrub_metadata(connection, name)
    num_strings = _drop_strings(connection, schemas, strings)
    connection.execute("VACUUM")
    return Scrubbed(num_rows=num_rows, num_strings=num_strings)


def _scrub_metadata(connection: sqlite3.Connection, table: str) -> int:
    rows = connection.execute(f'SELECT rowid, name, value FROM "{table}"').fetchall()
    guilty = [(i,) for i, name, value in rows if "ENVIRON" in str(name).upper() or _VARIABLES.search(str(value) + "\0")]
    connection.executemany(f'DELETE FROM "{table}" WHERE rowid = ?', guilty)
    return len(guilty)


def _drop_strings(connection: sqlite3.Connection, schemas: dict[str, str], strings: list[str]) -> int:
    """Delete what no column names any more, and what looks like an environment whoever names it."""
    used: set[int] = set()
    for table, schema in schemas.items():
        for column in _REFERENCE.findall(schema):
            used.update(row[0] for row in connection.execute(f'SELECT DISTINCT "{column}" FROM "{table}"'))
    num_dropped = 0
    for table in strings:
        rows = connection.execute(f'SELECT id, value FROM "{table}"').fetchall()
        dropped = [(i,) for i, value in rows if i not in used or _VARIABLES.search(str(value))]
        connection.executemany(f'DELETE FROM "{table}" WHERE id = ?', dropped)
        num_dropped += len(dropped)
    return num_dropped
