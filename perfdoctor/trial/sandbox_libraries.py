"""Writers that open their file from C: torch's archives and traces, safetensors, sqlite, HDF5, dbm.

What Python sees of them is a function with a path among its arguments: the path is exchanged there.
"""

from __future__ import annotations

import errno
import functools
import importlib.util
import os
import sqlite3
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfdoctor.trial.sandbox_files import FilePatches

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def redirect_libraries(files: FilePatches) -> None:
    """Replace what is loaded, and what is installed and would bind the real functions once it is."""
    files.redirect(sqlite3, "connect", functools.partial(_database, files))
    _redirect_dbm(files)
    if importlib.util.find_spec("h5py"):
        hdf5: Any = importlib.import_module("h5py").h5f
        files.redirect(hdf5, "create", functools.partial(_hdf5_created, files, hdf5))
        files.redirect(hdf5, "open", functools.partial(_hdf5_opened, files, hdf5))
        files.redirect(hdf5, "is_hdf5", _read(files, 0))
    if "torch" in sys.modules:
        _redirect_torch(files)
    if "torch" in sys.modules and importlib.util.find_spec("safetensors"):
        import safetensors.torch

        files.redirect(safetensors, "serialize_file", _written(files, 1))
        files.redirect(safetensors, "safe_open", _read(files, 0))


def _redirect_torch(files: FilePatches) -> None:
    torch: Any = sys.modules["torch"]
    files.redirect(torch._C, "PyTorchFileWriter", _written(files, 0))
    files.redirect(torch._C, "PyTorchFileReader", _read(files, 0))
    files.redirect(torch._C, "import_ir_module", _read(files, 1))
    for owner in (torch._C.ScriptModule, torch._C.ScriptFunction, torch._C._autograd._ProfilerResult):
        files.redirect(owner, "save", _written(files, 1), method=True)
    files.redirect(torch._C, "_save_jit_module", _written(files, 1))
    files.redirect(torch._C, "_load_jit_module_from_file", _read(files, 0))
    files.redirect(torch._C._profiler, "_add_execution_trace_observer", _written(files, 0))
    files.redirect(torch.UntypedStorage, "from_file", functools.partial(_mapped, files))
    files.redirect(torch, "from_file", functools.partial(_mapped, files))


def redirect_numpy(files: FilePatches) -> None:
    """np.savetxt opens its file by a table that holds the real `open`. After io.open is replaced."""
    import io

    from numpy.lib import _datasource

    table: Any = _datasource._file_openers  # type: ignore[attr-defined]
    table.keys()  # fills it
    files.put(table, "_file_openers", {**table._file_openers, None: io.open})


def _redirect_dbm(files: FilePatches) -> None:
    for name, suffixes in (("gnu", ("",)), ("ndbm", (".db", ".dir", ".pag"))):
        if importlib.util.find_spec("_gdbm" if name == "gnu" else "_dbm"):
            module = importlib.import_module(f"dbm.{name}")
            files.redirect(module, "open", functools.partial(_dbm_opened, files, suffixes))


def _is_path(path: Any) -> bool:
    return isinstance(path, str | bytes | os.PathLike)


def _written(files: FilePatches, place: int) -> Callable[..., Arguments | None]:
    """The argument at `place` is a file that is written anew."""
    return functools.partial(_exchanged, lambda path: files.writable(path, copied=False), place)


def _read(files: FilePatches, place: int) -> Callable[..., Arguments | None]:
    """The argument at `place` is a file that is read."""
    return functools.partial(_exchanged, files.view.read, place)


def _exchanged(lead: Callable[[Any], Any], place: int, *args: Any, **kwargs: Any) -> Arguments | None:
    if len(args) <= place or not _is_path(args[place]):
        return None
    return (*args[:place], lead(args[place]), *args[place + 1 :]), kwargs


def _mapped(files: FilePatches, path: Any, shared: Any = False, *args: Any, **kwargs: Any) -> Arguments:
    """A file in memory: `shared` makes it where it is missing, and writes what is changed."""
    place = files.writable(path, copied=True) if shared else files.view.read(path)
    return (place, shared, *args), kwargs


def _database(files: FilePatches, path: Any, *args: Any, **kwargs: Any) -> Arguments | None:
    text = os.fsdecode(path) if _is_path(path) else ":memory:"
    if text in ("", ":memory:"):
        return None
    if kwargs.get("uri") and text.startswith("file:"):
        plain, _, query = text[5:].partition("?")
        if "mode=memory" in query or "mode=ro" in query or "::memory" in plain:
            return None
        return (f"file:{files.view.write(plain, copied=True)}?{query}", *args), kwargs
    return (files.view.write(path, copied=True), *args), kwargs


def _dbm_opened(
    files: FilePatches, suffixes: tuple[str, ...], path: Any, flag: str = "r", *args: Any, **kwargs: Any
) -> Arguments | None:
    if files.view.locate(path) is None:
        return None
    text = os.fsdecode(path)
    for suffix in suffixes:
        if flag[0] != "n" and os.path.lexists(files.view.read(text + suffix)):
            files.view.write(text + suffix, copied=True)
    return (files.view.write(text, copied=False), flag, *args), kwargs


def _hdf5_created(files: FilePatches, hdf5: Any, name: Any, *args: Any, **kwargs: Any) -> Arguments:
    if args and args[0] & hdf5.ACC_EXCL:
        files.refuse_existing(name)
    return (files.writable(name, copied=False), *args), kwargs


def _hdf5_opened(files: FilePatches, hdf5: Any, name: Any, *args: Any, **kwargs: Any) -> Arguments | None:
    flags = args[0] if args else kwargs.get("flags", hdf5.ACC_RDWR)
    found = files.view.locate(name)
    if found is None or not flags & hdf5.ACC_RDWR:
        return (files.view.read(name), *args), kwargs
    if not files.view.exists(found):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return (files.writable(name, copied=True), *args), kwargs
