"""One launch of a Triton kernel, and the same launch prepared for the next time.

The first launch of a kernel goes through Triton, which compiles it; from the second on the compiled walker launches it
with prepared arguments, because Triton's own launch costs the host more time than a small kernel runs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perfdoctor.errors import UsageError
from perfdoctor.kernels import pointer_table
from perfdoctor.kernels.walker import compiled_walker

_interpreter = threading.Lock()  # Triton's interpreter keeps the running program's number in one place for all threads
_log = logging.getLogger("perfdoctor")


def check_kernel(kernel: str | None, kernels: Sequence[str]) -> None:
    """Raises UsageError for a name that is none of `kernels`."""
    if kernel is not None and kernel not in kernels:
        raise UsageError(f"kernel={kernel!r}: expected one of {', '.join(kernels)}, or None to have it chosen")


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; does not import it."""
    return importlib.util.find_spec("triton") is not None


def launch(kernel: Any, device: torch.device, grid: int, arguments: Sequence[Any], constants: dict[str, Any],
           num_warps: int, maxnreg: int | None = None) -> Any:  # fmt: skip
    """Launches through Triton, in a CUDA graph capture too; on the CPU through its interpreter.

    Returns the compiled kernel, which `prepare` takes.
    """
    if device.type == "cpu":
        with _interpreter:
            return kernel[(grid,)](*arguments, **constants)
    options = {"num_warps": num_warps}
    if maxnreg is not None and torch.version.cuda is not None:
        options["maxnreg"] = maxnreg
    relaxed = pointer_table.is_capturing(device)
    with torch.cuda.device(device), pointer_table.relaxed_capture() if relaxed else contextlib.nullcontext():
        return kernel[(grid,)](*arguments, **constants, **options)


def prepare(compiled: Any, device: torch.device, grid: int, arguments: Sequence[Any], sizes: Sequence[int]) -> Any:
    """A `Launch` (see driver_launch.h) of this compiled kernel with these arguments; None where there can be none.

    `sizes`: bytes of each argument in the kernel's signature. A float argument is set at every launch.
    """
    module = compiled_walker()
    if module is None or device.type == "cpu":
        return None
    values = [word_of(argument) for argument in arguments]
    try:
        threads = 32 * int(compiled.metadata.num_warps)
        function, shared = int(compiled.function), int(compiled.metadata.shared)
        with torch.cuda.device(device):
            return module.Launch(function, grid, threads, shared, values, list(sizes))
    except (AttributeError, TypeError, RuntimeError) as error:
        _log.info("this Triton's kernels are launched through Triton: %s", error)
        return None


def word_of(argument: Tensor | float) -> int:
    """The eight bytes that stand for an argument; 0 for a float, which may be infinite."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return 0 if isinstance(argument, float) else int(argument)
