"""What os.scandir gives for a folder that is partly redirected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from perfdoctor.trial.sandbox_view import View


class Entries:
    """What os.scandir gives: an iterator that is a context manager."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


class Entry:
    """As os.DirEntry, of a folder that is partly redirected."""

    def __init__(self, view: View, name: str, given: Any, folder: str) -> None:
        self.name: Any = os.fsencode(name) if isinstance(given, bytes) else name
        self.path: Any = os.path.join(os.fspath(given), self.name)
        self._place = view.read(os.path.join(folder, name), follow=False)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def is_symlink(self) -> bool:
        return os.path.islink(self._place)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self._place) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self._place) and (follow_symlinks or not self.is_symlink())

    def is_junction(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._place, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino
