"""The phases of a step as ranges: backward, and optimizer (closure, where it runs the loop's forward and backward).

Waits for data come as pauses.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from typing import Any

from perfdoctor.watch.patches import Patches
from perfdoctor.watch.pauses import Pause


class PhaseRanges:
    """Rows of (start, end, thread, phase) on the Unix clock, which is that of the recording. About 2 us a step."""

    def __init__(self) -> None:
        self.rows: list[Pause] = []
        self._patches = Patches()
        self._handles: list[Any] = []
        self._started: dict[int, int] = {}
        self._inside = False

    def install(self) -> None:
        """Register the optimizer hooks, idle until `begin`. Never from inside a hook: torch is iterating over them."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        compiling = torch.compiler.is_compiling

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._patches and not compiling():
                self._started[id(optimizer)] = time.time_ns()

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._started and not compiling() and id(optimizer) in self._started:
                start = self._started.pop(id(optimizer))
                closure = bool(self.rows) and self.rows[-1].name == "backward" and self.rows[-1].start_ns >= start
                self._add("closure" if closure else "optimizer", start)

        self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def begin(self) -> None:
        """Time `backward()` and `optimizer.step()` from now on."""
        if self._patches:
            return
        torch: Any = sys.modules["torch"]
        backward: Any = torch.autograd.backward

        @functools.wraps(backward)
        def timed_backward(*args: Any, **kwargs: Any) -> Any:
            if self._inside or torch.compiler.is_compiling():  # reentrant checkpointing calls it inside itself
                return backward(*args, **kwargs)
            self._inside, start = True, time.time_ns()
            try:
                return backward(*args, **kwargs)
            finally:
                self._inside = False
                self._add("backward", start)

        self._patches.replace(torch.autograd, "backward", timed_backward)

    def end(self) -> None:
        """Idle again."""
        self._patches.undo()
        self._started.clear()

    def remove(self) -> None:
        """Take the hooks back."""
        self.end()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget_started(self) -> None:
        """At the edge of a phase: the update that ends here would take in what happens at the edge."""
        self._started.clear()

    def _add(self, name: str, start_ns: int) -> None:
        self.rows.append(Pause(start_ns, time.time_ns(), threading.get_native_id(), name, -1))
