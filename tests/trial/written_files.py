"""What tests of the sandbox write, and what then lies in a folder."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file of a folder with its content; None for folders."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def database(path: str | os.PathLike[str], uri: bool = False) -> None:
    connection = sqlite3.connect(path, uri=uri)
    connection.execute("create table t(a)")
    connection.commit()
    connection.close()
