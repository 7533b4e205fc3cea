"""Triton kernels launched on the emulated device: the given stand-in, or an error that says how to give one.

Under TRITON_INTERPRET=1 kernels run on the CPU by themselves and are left alone.
"""

from __future__ import annotations

import sys
from typing import Any

from perfdoctor.emulate.patches import Patches
from perfdoctor.emulate.stand_ins import run_triton


def install(patches: Patches) -> None:
    """Replace launches until `patches` is undone. Where Triton is installed, torch._dynamo has loaded it already."""
    runtime: Any = sys.modules.get("triton.runtime.jit")
    if runtime is None:
        return
    original = runtime.KernelInterface.__getitem__

    def launch(self: Any, grid: Any) -> Any:
        if type(self).__name__ == "InterpretedFunction":
            return original(self, grid)
        return lambda *args, **kwargs: run_triton(self, grid, args, kwargs)

    patches.set(runtime.KernelInterface, "__getitem__", launch)
