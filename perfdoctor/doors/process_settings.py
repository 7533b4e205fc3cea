"""What a script sets for its whole process, put back after it: the report comes out where ours goes, in any mood.

What can be set once only is put back as well, as far as it can be: a script that dies of a treatment is run again.

The working directory and the environment are the sandbox's affair; `__main__`, `sys.argv` and `sys.path` that of
script.py.
"""

from __future__ import annotations

import builtins
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from perfdoctor.record.owners import USER, file_owner
from perfdoctor.watch.patches import Patches

_OF_SYS = (
    "stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__",
    "excepthook", "displayhook", "unraisablehook",
)  # fmt: skip


@contextmanager
def kept_settings() -> Iterator[None]:
    """Streams, hooks, built-in functions, signal handlers, warning filters, log handlers, the collector, torch's
    defaults, how processes are started, and which modules of the user's are loaded: afterwards as they were. A process
    group that is made in the block is destroyed."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        kept = (_modules(), _builtins(), _streams(), _collector(), _root_logger(), _start_method())
        for undo in (*kept, *_signals(), *_of_torch()):
            stack.callback(undo)
        mask = os.umask(0o077)
        os.umask(mask)
        stack.callback(os.umask, mask)
        stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())
        stack.callback(setattr, threading, "excepthook", threading.excepthook)
        yield


def _streams() -> Callable[[], None]:
    before = {name: getattr(sys, name) for name in _OF_SYS}

    def undo() -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the script's own, closed perhaps
                continue
        for name, value in before.items():
            setattr(sys, name, value)

    return undo


def _builtins() -> Callable[[], None]:
    """All but `open`, which others have replaced on purpose, and `_`, an interactive interpreter's."""
    before = {name: value for name, value in vars(builtins).items() if name not in ("open", "_")}

    def undo() -> None:
        for name, value in before.items():
            if vars(builtins).get(name) is not value:
                setattr(builtins, name, value)
        for name in [name for name in vars(builtins) if name not in before and name not in ("open", "_")]:
            delattr(builtins, name)

    return undo


def _modules() -> Callable[[], None]:
    """A script that is run again imports its own modules anew, as a new process would."""
    before = dict(sys.modules)

    def undo() -> None:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if before.get(name) is not module and isinstance(file, str) and file_owner(file) == USER:
                del sys.modules[name]
                if name in before:
                    sys.modules[name] = before[name]

    return undo


def _collector() -> Callable[[], None]:
    enabled, thresholds, callbacks = gc.isenabled(), gc.get_threshold(), list(gc.callbacks)

    def undo() -> None:
        (gc.enable if enabled else gc.disable)()
        gc.set_threshold(*thresholds)
        gc.callbacks[:] = callbacks

    return undo


def _start_method() -> Callable[[], None]:
    before = multiprocessing.get_start_method(allow_none=True)

    def undo() -> None:
        if multiprocessing.get_start_method(allow_none=True) != before:
            multiprocessing.set_start_method(before, force=True)

    return undo


def _root_logger() -> Callable[[], None]:
    root = logging.getLogger()
    handlers, filters, level, disabled = list(root.handlers), list(root.filters), root.level, root.manager.disable

    def undo() -> None:
        for handler in [each for each in root.handlers if each not in handlers]:
            root.removeHandler(handler)
            handler.close()  # its file is in the scratch folder
        root.handlers[:], root.filters[:] = handlers, filters
        root.setLevel(level)
        logging.disable(disabled)

    return undo


def _signals() -> list[Callable[[], None]]:
    """Handlers of the main thread; elsewhere nobody can set any."""
    if threading.current_thread() is not threading.main_thread():
        return []
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    (left, interval), begun = signal.getitimer(signal.ITIMER_REAL), time.monotonic()

    def undo() -> None:
        # An alarm of the script's is off; one that was on before rings when it would have.
        late = left - (time.monotonic() - begun)
        signal.setitimer(signal.ITIMER_REAL, max(late, 1e-3) if left else 0, interval)
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:  # None: set by C code
                signal.signal(number, handler)

    return [undo]


def _of_torch() -> list[Callable[[], None]]:
    """The settings that training scripts change, where torch is loaded."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return []
    dtype, device, threads = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    grad, precision = torch.is_grad_enabled(), torch.get_float32_matmul_precision()
    exact, warns = _determinism(torch)
    cudnn = [(name, getattr(torch.backends.cudnn, name)) for name in ("benchmark", "deterministic", "allow_tf32")]
    anomaly, checked = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    def undo() -> None:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        if _determinism(torch) != (exact, warns):  # setting it loads torch's compiler, which sets a variable
            torch.use_deterministic_algorithms(exact, warn_only=warns)
        torch.autograd.set_detect_anomaly(anomaly, checked)
        for name, value in cudnn:
            if getattr(torch.backends.cudnn, name) != value:
                setattr(torch.backends.cudnn, name, value)

    return [undo, _process_group(torch), _interop_threads(torch)]


def _process_group(torch: Any) -> Callable[[], None]:
    distributed = torch.distributed
    if not distributed.is_available() or distributed.is_initialized():
        return lambda: None

    def undo() -> None:
        if distributed.is_initialized():
            with suppress(Exception):  # of a backend that has failed
                distributed.destroy_process_group()

    return undo


def _interop_threads(torch: Any) -> Callable[[], None]:
    """torch takes their number once in a process, and refuses even the same one again: that is let through."""
    original, patches = torch.set_num_interop_threads, Patches()

    def setting(number: int) -> None:
        if number != torch.get_num_interop_threads():
            original(number)

    patches.replace(torch, "set_num_interop_threads", setting)
    return patches.undo


def _determinism(torch: Any) -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
