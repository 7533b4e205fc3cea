"""Stand-ins for what the CPU cannot run: a custom op without a CPU kernel, a Triton kernel.

    perfdoctor.emulate.stand_in("flash_attn::_flash_attn_forward", my_reference)
    perfdoctor.emulate.stand_in("softmax_kernel", lambda grid, x, out, n: out.copy_(x.softmax(-1)))

The first form names a torch op and gets its arguments; the second names a Triton kernel and gets the grid first.
Until a stand-in is given, using such an op is an error that names the op and the line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from perfdoctor.errors import UsageError

_stand_ins: dict[str, Callable[..., Any]] = {}


def stand_in(name: str, function: Callable[..., Any]) -> None:
    """Let `function` answer for the op or kernel `name` on the emulated device."""
    _stand_ins[name] = function


def run_or_explain(func: Any, args: Any, kwargs: Any, error: NotImplementedError) -> Any:
    """The stand-in's answer for a torch op that has no CPU kernel.

    Raises:
        UsageError: no stand-in was given.
    """
    name = str(func._schema.name)
    if name.startswith("aten::"):
        raise error
    function = _stand_ins.get(name)
    if function is None:
        raise UsageError(_explained(name, "op")) from error
    return function(*args, **kwargs)


def run_triton(kernel: Any, grid: Any, args: Any, kwargs: Any) -> Any:
    """The stand-in's answer for a Triton kernel.

    Raises:
        UsageError: no stand-in was given.
    """
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):  # autotuners and heuristics wrap the kernel
        kernel = kernel.fn
    name = str(getattr(kernel, "__name__", kernel))
    function = _stand_ins.get(name)
    if function is None:
        raise UsageError(_explained(name, "Triton kernel"))
    return function(grid, *args, **kwargs)


def _explained(name: str, what: str) -> str:
    frame = sys._getframe(2)
    outer = frame
    while outer.f_back is not None and _is_library(outer.f_code.co_filename):
        outer = outer.f_back
    line = f"{outer.f_code.co_filename}:{outer.f_lineno}"
    return (
        f"{line}: the {what} {name} has no CPU version, so the emulated CUDA device cannot run it. Give it a stand-in: "
        f"perfdoctor.emulate.stand_in({name!r}, function)"
    )


def _is_library(file: str) -> bool:
    return "site-packages" in file or "/perfdoctor/emulate/" in file or "/triton/" in file
