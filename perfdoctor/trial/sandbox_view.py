"""The user's files as a throw-away run sees them: redirected copies first, deletions hidden, the real files untouched.

A file of the user's at /a/b has its redirected copy at SCRATCH/files/a/b. What the run deletes is only hidden. A path
that is let through is the file itself; `let_through` says which and why.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class View:
    """Where each path leads. Everything here runs `quiet`: the replaced functions then do what they always did."""

    def __init__(self, scratch: str) -> None:
        self.scratch = scratch
        self.root = os.path.join(scratch, "files")
        self.hidden_paths: set[str] = set()
        self.let_through = let_through(scratch)
        self._through = tuple(os.path.join(os.path.realpath(folder), "") for folder in self.let_through)
        # The compile cache and the sockets of worker processes lie beside other temporary files.
        temporary = os.path.realpath(os.path.dirname(scratch))
        self._temporary = tuple(os.path.join(temporary, name) for name in ("torchinductor_", "pymp-"))
        self._folders: dict[str, str] = {}  # a folder as spelled -> without links: a checkpoint folder is named often
        self._local = threading.local()

    @property
    def busy(self) -> bool:
        return getattr(self._local, "busy", False)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """For this thread, the replaced functions are the real ones inside."""
        before = self.busy
        self._local.busy = True
        try:
            yield
        finally:
            self._local.busy = before

    def locate(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The absolute path of what may be redirected; None for a descriptor and for what is let through.

        A run that made a folder and went there stands below the scratch folder: from there `../data` is the user's.
        """
        absolute = self._absolute(path, dir_fd)
        if absolute is not None and not os.path.isabs(os.fsdecode(path)):
            absolute = self.original(absolute)
        return None if absolute is None or self._is_through(absolute) else absolute

    def touched(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The same for a path as the system takes it: from below the scratch folder it leads nowhere else."""
        absolute = self._absolute(path, dir_fd)
        return None if absolute is None or self._is_through(absolute) else absolute

    def is_roundabout(self, path: Any, dir_fd: int | None = None) -> bool:
        """Whether a path may lead through a folder that only this run has, so that the system does not find it."""
        text = os.fsdecode(path)
        if ".." in text.split("/"):
            return True
        if os.path.isabs(text):
            return False
        folder = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        return f"{folder}/".startswith(f"{self.root}/")

    def _absolute(self, path: Any, dir_fd: int | None) -> str | None:
        if isinstance(path, int) or not isinstance(path, str | bytes | os.PathLike):
            return None
        text = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        folder, name = os.path.split(os.path.join(os.getcwd(), text).rstrip("/") or "/")
        if name in ("", ".", ".."):
            return os.path.realpath(text)
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        return os.path.join(self._folders[folder], name)

    def _is_through(self, absolute: str) -> bool:
        path = f"{absolute}/"
        return path.startswith(self._through + self._temporary) or "/__pycache__/" in path

    def mirror(self, path: str) -> str:
        """The place of the redirected copy."""
        return self.root + path

    def original(self, path: str) -> str:
        """The user's path behind a place below the scratch folder; other paths as they are."""
        return path[len(self.root) :] if path.startswith(self.root + "/") else path

    def hidden(self, path: str) -> bool:
        """Whether the real file is hidden: it, or a folder that it lies in, was deleted by the run."""
        if not self.hidden_paths:
            return False
        while path not in self.hidden_paths:
            parent = os.path.dirname(path)
            if parent == path:
                return False
            path = parent
        return True

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.mirror(path)) or self._real(path)

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(self.mirror(path)) or (not self.hidden(path) and os.path.isdir(path))

    def _real(self, path: str) -> bool:
        return not self.hidden(path) and os.path.lexists(path)

    def follow(self, path: str) -> str:
        """Through a link of the user's, to what it stands for."""
        if not os.path.lexists(self.mirror(path)) and not self.hidden(path) and os.path.islink(path):
            return os.path.realpath(path)
        return path

    def read(self, path: Any, dir_fd: int | None = None, *, follow: bool = True) -> Any:
        """What to open or stat for `path`: the very object given where nothing was redirected."""
        found = self.locate(path, dir_fd)
        if found is None:
            return path
        given, path = path, _like(path, found) if self.is_roundabout(path, dir_fd) else path
        target = self.follow(found) if follow else found
        copy = self.mirror(target)
        if os.path.lexists(copy):
            shared = os.path.isdir(copy) and self._real(target)  # the real folder holds more than the redirected one
            return path if shared else _like(given, copy)
        return _like(given, copy) if self.hidden(target) else path

    def write(self, path: Any, dir_fd: int | None = None, *, copied: bool, follow: bool = True) -> Any:
        """Where to write instead; `copied` brings what is there before. A device, a pipe, a socket is itself."""
        found = self.locate(path, dir_fd)
        if found is None or _is_device(found):
            return path
        target = self.locate(self.follow(found)) if follow else found
        if target is None:
            return path
        copy = self.mirror(target)
        self._make_parents(target)
        if copied and not os.path.lexists(copy) and self._real(target):
            if os.path.isdir(target):
                os.makedirs(copy, exist_ok=True)
            else:
                shutil.copy2(target, copy, follow_symlinks=follow)
        return _like(path, copy)

    def _make_parents(self, path: str) -> None:
        parent = os.path.dirname(path)
        if self.is_folder(parent):  # else the call fails, as it would have
            os.makedirs(self.mirror(parent), exist_ok=True)

    def names(self, path: str) -> list[str]:
        """What a folder holds: real and redirected, less what is hidden."""
        found = set(os.listdir(self.mirror(path))) if os.path.isdir(self.mirror(path)) else set()
        if not self.hidden(path) and os.path.isdir(path):
            found |= {name for name in os.listdir(path) if not self.hidden(os.path.join(path, name))}
        return sorted(found)

    def remove(self, path: str) -> None:
        """Hide the real file, drop the redirected one."""
        copy = self.mirror(path)
        if os.path.isdir(copy) and not os.path.islink(copy):
            shutil.rmtree(copy)
        elif os.path.lexists(copy):
            os.unlink(copy)
        if self._real(path):
            self.hidden_paths.add(path)

    def move(self, source: str, target: str) -> None:
        """Rename as the run sees it: the real source stays, a copy stands under the new name."""
        self.check_move(source, target)
        if source == target:
            return
        self._make_parents(target)
        if not os.path.isdir(os.path.dirname(self.mirror(target))):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source, None, target)
        moved = self.mirror(target) + ".moving"
        self.copy(source, moved)
        self.remove(target)
        os.rename(moved, self.mirror(target))
        self.remove(source)

    def check_move(self, source: str, target: str) -> None:
        """Raise what os.rename would raise."""
        if not self.exists(source):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source, None, target)
        if self.exists(target) and self.is_folder(target) and source != target:
            number = errno.ENOTEMPTY if self.is_folder(source) else errno.EISDIR
            if number == errno.EISDIR or self.names(target):
                raise OSError(number, os.strerror(number), source, None, target)

    def copy(self, source: str, place: str) -> None:
        """The file or the whole folder `source`, as the run sees it, to `place` below the scratch folder."""
        if self.is_folder(source) and not os.path.islink(self.read(source, follow=False)):
            os.makedirs(place, exist_ok=True)
            for name in self.names(source):
                self.copy(os.path.join(source, name), os.path.join(place, name))
        else:
            shutil.copy2(self.read(source, follow=False), place, follow_symlinks=False)

    def files(self) -> tuple[str, ...]:
        """What the run wrote, under the names it used."""
        found = []
        for folder, _, names in os.walk(self.root):
            found += [self.original(os.path.join(folder, name)) for name in names]
        return tuple(sorted(found))


def let_through(scratch: str) -> dict[str, str]:
    """Folders whose files are not redirected -> why."""
    home = os.path.expanduser("~")
    found = {
        scratch: "deleted at the end",
        "/dev": "devices, pipes, and the shared memory of DataLoader workers",
        "/proc": "the kernel's",
        "/sys": "the kernel's",
        os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"): "caches, of downloads and of compiled code",
        os.path.join(home, ".triton"): "Triton's cache of compiled kernels",
        os.path.join(home, ".nv"): "the driver's cache of compiled kernels",
    }
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH"):
        if os.environ.get(name):
            found[os.environ[name]] = f"a cache of compiled code ({name})"
    return found


def _is_device(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _like(given: Any, text: str) -> Any:
    return os.fsencode(text) if isinstance(given, bytes) else text
