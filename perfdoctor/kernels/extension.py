"""This folder's C++ and CUDA files, compiled on first use and kept on disk beside torch's own extensions.

torch's loader compiles; its lock does not: that is a file, and whoever finds one that a killed process left waits for
ever. Here the lock ends with the process that holds it, and what is built is put in its place whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_LONGEST_WAIT_S = 120.0  # for another process that compiles: it takes 20 s, the CUDA file some 60
_OVER_S = 3600.0  # nobody compiles for so long
_SOURCES = Path(__file__).parent


def load_extension(name: str, sources: Sequence[str], cuda_flags: Sequence[str] = ()) -> Any:
    """The module that these files make. Raises what the compiler, the disk or the loader raises, and TimeoutError."""
    folder = _cache_folder() / f"{name}-{_fingerprint(sources, cuda_flags)}"
    if (module := _kept(folder)) is not None:
        return module
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        if (module := _awaited(lock.fileno(), folder)) is not None:
            return module
        try:
            module = _kept(folder)
            return module or _compiled(name, [str(_SOURCES / source) for source in sources], list(cuda_flags), folder)
        finally:  # closing it does not suffice: a process forked meanwhile holds it open
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def _cache_folder() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()) / "perfdoctor"


def _fingerprint(sources: Sequence[str], cuda_flags: Sequence[str]) -> str:
    """Of all that makes a module another one."""
    of_torch = (torch.__version__, torch.version.cuda, torch.version.hip)
    made_by = (of_torch, sysconfig.get_config_var("SOABI"), os.uname().machine, list(cuda_flags))
    found = hashlib.sha256(repr(made_by).encode())
    for source in sources:
        found.update((_SOURCES / source).read_bytes())
    return found.hexdigest()[:16]


def _kept(folder: Path) -> Any | None:
    """The module built earlier; None where there is none that can be loaded."""
    for path in folder.glob("*.so"):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        with suppress(ImportError):  # of another system's libraries: a home that several machines share
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return None


def _compiled(name: str, sources: list[str], cuda_flags: list[str], folder: Path) -> Any:
    from torch.utils.cpp_extension import load

    for left in folder.glob("build-*"):  # by one who was killed
        with suppress(OSError):  # without locks, another may do the same
            if time.time() - left.stat().st_mtime > _OVER_S:
                shutil.rmtree(left, ignore_errors=True)
    # Each time another one: torch takes one that it has seen for built.
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder, ignore_cleanup_errors=True) as build:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the loader warns about compilers and architectures that it guesses
            module = load(name, sources, extra_cflags=["-O2"], extra_cuda_cflags=cuda_flags, build_directory=build)
        made = Path(module.__file__)
        made.replace(folder / made.name)
    return module


def _awaited(lock: int, folder: Path) -> Any | None:
    """The module that another process has built meanwhile; None once the lock is ours."""
    until = time.monotonic() + _LONGEST_WAIT_S
    while not _is_taken(lock):
        if (module := _kept(folder)) is not None:
            return module
        if time.monotonic() > until:
            raise TimeoutError(f"another process has been compiling for {_LONGEST_WAIT_S:.0f} s ({folder})")
        time.sleep(0.1)
    return None


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: twice the work, in two folders
        return True
    return True
