"""Calls whose effect a graph does not repeat: what a builtin or a library function that a line calls does."""

from __future__ import annotations

import functools
import queue
from io import IOBase
from types import CodeType
from typing import Any

from perfdoctor.record.owners import file_owner, package_path

_CLOCKS = ("time", "_datetime", "datetime")
# Functions of Python's and of torch's, by file and name, with what they do.
_FUNCTIONS = {
    ("threading.py", "start"): "thread",
    ("concurrent/futures/thread.py", "submit"): "thread",
    ("concurrent/futures/process.py", "submit"): "thread",
    ("multiprocessing/pool.py", "apply_async"): "thread",
    ("torch/utils/data/dataloader.py", "__next__"): "loader",
    ("warnings.py", "warn"): "warn",
    ("_py_warnings.py", "warn"): "warn",  # in Python itself from 3.14 on
    ("queue.py", "put"): "queue",
    ("multiprocessing/queues.py", "put"): "queue",
    ("queue.py", "get"): "queue",
    ("multiprocessing/queues.py", "get"): "queue",
    ("torch/serialization.py", "save"): "file",
    ("torch/optim/optimizer.py", "zero_grad"): "zero-grad",
    ("torch/nn/modules/module.py", "zero_grad"): "zero-grad",
    ("torch/random.py", "manual_seed"): "seed",
    ("torch/cuda/random.py", "manual_seed"): "seed",
    ("torch/cuda/random.py", "manual_seed_all"): "seed",
}


def builtin_kind(function: Any) -> str:
    """What a function made in C does, in a word; "" for what a graph does not care about."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None) or type(owner).__module__
    if module in _CLOCKS and name not in ("sleep", "strftime"):
        return "clock"
    if isinstance(owner, type) and owner.__module__ == "datetime" and name in ("now", "utcnow", "today"):
        return "clock"
    if (isinstance(owner, IOBase) and name in ("write", "writelines")) or function is open:
        return "file"
    if isinstance(owner, queue.SimpleQueue) and name in ("put", "get"):
        return "queue"
    if name == "urandom":
        return "entropy"
    if (module, name) == ("_warnings", "warn"):
        return "warn"
    if function is setattr:
        return "setattr"
    return "print" if function is print else ""


@functools.lru_cache(maxsize=8192)
def library_kind(code: CodeType) -> str:
    """The same for a function of a library."""
    path = package_path(code.co_filename).replace("\\", "/")
    file = path.rpartition("/")[2]
    for (ending, name), kind in _FUNCTIONS.items():
        if code.co_name == name and path.endswith(ending):
            return kind
    if "/pathlib" in path and code.co_name in ("write_text", "write_bytes", "open"):  # a package from 3.13 on
        return "file"
    if file in ("uuid.py", "secrets.py"):
        return "entropy"
    # logging, tqdm, TensorBoard, wandb, ...: whatever of theirs is called, it shows or keeps something
    return "log" if file_owner(code.co_filename) == "logger" else ""


# Reached through wrappers of torch's own, so not called by the user's line itself.
WRAPPED = ("zero-grad", "seed")
