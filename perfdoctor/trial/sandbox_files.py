"""The functions that open, look at, change and delete files, replaced for the time of a sandbox.

Each replacement asks the view where the path leads and calls the real function with that. A name that a module bound
early (`from os import remove`) is replaced there too. Kept past the end of the sandbox, a replacement is the real
function again.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

from perfdoctor.trial.sandbox_entries import Entries, Entry
from perfdoctor.trial.sandbox_libraries import redirect_libraries, redirect_numpy
from perfdoctor.trial.sandbox_view import View
from perfdoctor.watch.patches import Patches

_READS = ("stat", "access", "chdir", "statvfs", "getxattr", "listxattr")
_LINK_READS = ("lstat", "readlink")
_CHANGES = ("chmod", "utime", "chown", "truncate", "setxattr", "removexattr")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TEMPORARY_FILE = getattr(os, "O_TMPFILE", 0)

Redirect = Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]


class FilePatches:
    """Every replaced function; `undo` puts all back."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.active = True
        self._patches = Patches()
        self._replaced: dict[int, tuple[Any, Any]] = {}  # id of the real function -> (it, its replacement)

    def install(self) -> None:
        """Replace everything."""
        for name in (*_READS, *_LINK_READS):
            self.redirect(os, name, functools.partial(self._reading, name in _READS))
        for name in _CHANGES:
            self.redirect(os, name, self._changing)
        for name in ("mkfifo", "mknod"):
            self.redirect(os, name, self._creating)
        self.redirect(os, "open", self._descriptor)
        self.redirect(io, "open", self._opening)
        self._answer(os, "getcwd", lambda: self.view.original(os.getcwd()))
        self._answer(os, "getcwdb", lambda: os.fsencode(self.view.original(os.getcwd())))
        self._answer(os, "listdir", self._listdir)
        self._answer(os, "scandir", self._scandir)
        self._answer(os, "mkdir", self._mkdir)
        for name in ("remove", "unlink", "rmdir"):
            self._answer(os, name, functools.partial(self._remove, name))
        for name in ("rename", "replace"):
            self._answer(os, name, functools.partial(self._rename, name))
        self.redirect(os, "link", self._linking)
        self.redirect(os, "symlink", self._symlinking)
        self._answer(shutil, "rmtree", self._rmtree)
        self.redirect(tempfile, "_sanitize_params", self._temporary_folder)
        redirect_libraries(self)
        self._replace_early_names()
        self._patches.replace(builtins, "open", io.open)
        redirect_numpy(self)
        self._patches.replace(io, "FileIO", _file_io(self))

    def undo(self) -> None:
        """Put everything back; replacements that somebody kept are the real functions from now on."""
        self.active = False
        self._patches.undo()

    # ---- how a replacement is made

    def redirect(self, owner: Any, name: str, redirect: Redirect, *, method: bool = False) -> None:
        """Call the real function with the arguments that `redirect` gives. `method`: the first is the object's own."""
        if not hasattr(owner, name):
            return
        real = getattr(owner, name)

        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args
            if self.active and not self.view.busy:
                with self.view.quiet():
                    changed = redirect(*args, **kwargs)
                if changed is not None:
                    args, kwargs = changed
            with _named(self.view, *given[:1], *args[:1]):
                return real(*args, **kwargs)

        self._put(owner, name, real, staticmethod(call) if isinstance(owner, type) and not method else call)

    def put(self, owner: Any, name: str, value: object) -> None:
        """Replace something that is no function."""
        self._patches.replace(owner, name, value)

    def _answer(self, owner: Any, name: str, answer: Callable[..., Any]) -> None:
        """Give the replacement's own answer; `NotImplemented` leaves the call to the real function."""
        real = getattr(owner, name)

        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.active and not self.view.busy:
                with self.view.quiet(), _named(self.view):
                    given = answer(*args, **kwargs)
                if given is not NotImplemented:
                    return given
            return real(*args, **kwargs)

        self._put(owner, name, real, call)

    def _put(self, owner: Any, name: str, real: Any, call: Any) -> None:
        self._patches.replace(owner, name, call)
        self._replaced.setdefault(id(real), (real, call))

    def _replace_early_names(self) -> None:
        """`from os import remove` in a module that is loaded already."""
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType) or module.__name__ in _LOWEST:
                continue
            for name, value in list(vars(module).items()):
                real, call = self._replaced.get(id(value), (None, None))
                if real is not None and real is value:
                    self._patches.replace(module, name, call)

    # ---- where the arguments lead

    def _reading(self, follow: bool, path: Any = ".", *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        follow = follow and kwargs.get("follow_symlinks", True)
        found = self.view.read(path, dir_fd, follow=follow)
        return None if found is path else ((found, *args), kwargs)

    def _changing(self, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        located = self.view.locate(path, dir_fd)
        if located is None:
            return None
        if not self.view.exists(located):
            return (self.view.mirror(located), *args), kwargs
        follow = kwargs.get("follow_symlinks", True)
        return (self.view.write(path, dir_fd, copied=True, follow=follow), *args), kwargs

    def _creating(self, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        self.refuse_existing(path, dir_fd)
        return (self.view.write(path, dir_fd, copied=False, follow=False), *args), kwargs

    def refuse_existing(self, path: Any, dir_fd: int | None = None) -> None:
        """Raise FileExistsError where there is such a file."""
        found = self.view.locate(path, dir_fd)
        if found is not None and self.view.exists(found):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def _opening(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("opener") or len(args) > 5 or isinstance(file, int) or not isinstance(mode, str):
            return None  # an opener calls os.open, which leads on
        if not set(mode) & set("wax+"):
            return (self.view.read(file), mode, *args), kwargs
        if "x" in mode:
            self.refuse_existing(file)
        return (self.writable(file, copied="w" not in mode), mode, *args), kwargs

    def writable(self, file: Any, *, copied: bool, dir_fd: int | None = None) -> Any:
        """Where to write instead of `file`; `copied` brings what is there before."""
        found = self.view.locate(file, dir_fd)
        if found is not None and self.view.is_folder(found):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file)
        return self.view.write(file, dir_fd, copied=copied)

    def _descriptor(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        located = self.view.locate(path, dir_fd)
        if located is None:
            return None
        if _TEMPORARY_FILE and flags & _TEMPORARY_FILE == _TEMPORARY_FILE:
            os.makedirs(self.view.mirror(located), exist_ok=True)
            return (self.view.mirror(located), flags, mode), {}
        if not flags & _WRITING:
            found = self.view.read(path, dir_fd)
            return None if found is path else ((found, flags, mode), {})
        if flags & os.O_CREAT and flags & os.O_EXCL:
            self.refuse_existing(path, dir_fd)
        return (self.writable(path, copied=not flags & os.O_TRUNC, dir_fd=dir_fd), flags, mode), {}

    def _linking(self, src: Any, dst: Any, **kwargs: Any) -> Any:
        self.refuse_existing(dst, kwargs.get("dst_dir_fd"))
        source = self.view.write(src, kwargs.pop("src_dir_fd", None), copied=True)
        return (source, self.view.write(dst, kwargs.pop("dst_dir_fd", None), copied=False, follow=False)), kwargs

    def _symlinking(self, src: Any, dst: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        self.refuse_existing(dst, dir_fd)
        text = os.fsdecode(src)
        base = self.view.locate(dst, dir_fd)
        if base is not None:  # to the redirected copy where there is one, else to the real file
            src = self.view.read(os.path.join(os.path.dirname(base), text))
        return (src, self.view.write(dst, dir_fd, copied=False, follow=False), *args), kwargs

    def _temporary_folder(self, prefix: Any, suffix: Any, folder: Any) -> Any:
        found = self.view.locate(folder) if folder is not None else None
        if found is None or not self.view.is_folder(found):
            return None
        os.makedirs(self.view.mirror(found), exist_ok=True)
        mirror = self.view.mirror(found)
        return (prefix, suffix, os.fsencode(mirror) if isinstance(folder, bytes) else mirror), {}

    # ---- answers of our own

    def _listdir(self, path: Any = ".") -> Any:
        found = self.view.locate(path)
        if found is None or not self._differs(found, path):
            return NotImplemented
        names = self.view.names(self._folder(found))
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def _scandir(self, path: Any = ".") -> Any:
        found = self.view.locate(path)
        if found is None or not self._differs(found, path):
            return NotImplemented
        folder = self._folder(found)
        return Entries([Entry(self.view, name, path, folder) for name in self.view.names(folder)])

    def _differs(self, found: str, given: Any) -> bool:
        """Whether the run sees something else in a folder than the system does."""
        copied = bool(self.view.hidden_paths) or os.path.lexists(self.view.mirror(found))
        return copied or self.view.is_roundabout(given)

    def _folder(self, path: str) -> str:
        if not self.view.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not self.view.is_folder(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return self.view.follow(path)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        if self.view.locate(path, dir_fd) is None:
            return NotImplemented
        self.refuse_existing(path, dir_fd)
        os.mkdir(self.view.write(path, dir_fd, copied=False, follow=False), mode)
        return None

    def _remove(self, name: str, path: Any, *, dir_fd: int | None = None) -> Any:
        found = self.view.locate(path, dir_fd)
        if found is None:
            return NotImplemented
        linked = os.path.islink(self.view.read(found, follow=False))
        folder = self.view.is_folder(found) and not linked
        problem = 0
        if not self.view.exists(found):
            problem = errno.ENOENT
        elif name == "rmdir":
            problem = (errno.ENOTEMPTY if self.view.names(found) else 0) if folder else errno.ENOTDIR
        elif folder:
            problem = errno.EISDIR
        if problem:
            raise OSError(problem, os.strerror(problem), path)
        self.view.remove(found)
        return None

    def _rmtree(self, path: Any, ignore_errors: bool = False, *args: Any, **kwargs: Any) -> Any:
        found = self.view.locate(path, kwargs.get("dir_fd"))
        if found is None:
            return NotImplemented
        if self.view.is_folder(found) and not os.path.islink(self.view.read(found, follow=False)):
            self.view.remove(found)
        elif not ignore_errors:
            number = errno.ENOTDIR if self.view.exists(found) else errno.ENOENT
            raise OSError(number, os.strerror(number), path)
        return None

    def _rename(self, name: str, src: Any, dst: Any, *, src_dir_fd: int | None = None,
                dst_dir_fd: int | None = None) -> Any:  # fmt: skip
        source, target = self.view.locate(src, src_dir_fd), self.view.locate(dst, dst_dir_fd)
        if source is None and target is None:
            return NotImplemented
        if source is None:  # out of the scratch folder (a temporary file) into the user's
            getattr(os, name)(src, self.view.write(dst, dst_dir_fd, copied=False, follow=False))
        elif target is None:
            self.view.copy(source, os.fsdecode(dst))
            self.view.remove(source)
        else:
            self.view.move(source, target)
        return None


# Where the real functions live: a replacement put there would call itself.
_LOWEST = ("posix", "nt", "_io", "builtins", "io", "os", "sqlite3", "_sqlite3", "tempfile", "torch._C", __name__)


def _file_io(patches: FilePatches) -> type:
    real: Any = io.FileIO

    class Kind(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    class FileIO(real, metaclass=Kind):  # type: ignore[misc]
        def __init__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
            if patches.active and not patches.view.busy and not kwargs.get("opener") and len(args) < 2:
                with patches.view.quiet():
                    changed = patches._opening(file, mode, *args, **kwargs)
                if changed is not None:
                    (file, mode, *args), kwargs = changed  # type: ignore[assignment]
            super().__init__(file, mode, *args, **kwargs)

    return FileIO


class _named:
    """Errors name the user's path, as it was `given`, not the place that was `used` for it."""

    def __init__(self, view: View, given: Any = None, used: Any = None) -> None:
        self.view, self.given, self.used = view, given, used

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            for name in ("filename", "filename2"):
                value = getattr(error, name)
                if isinstance(value, str):
                    known = value == self.used and isinstance(self.given, str | os.PathLike)
                    setattr(error, name, os.fspath(self.given) if known else self.view.original(value))
