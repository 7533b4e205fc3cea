"""The window that Nsight Systems records, in place of the torch.profiler windows of a session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perfdoctor.record.capture import Capture, Costs
from perfdoctor.watch.annotate import annotate
from perfdoctor.watch.calibration import launch_cost
from perfdoctor.watch.clocks import cuda_active
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.profile import profiler_running

_ONE_CLIENT = "It and nsys cannot both trace the GPU (CUPTI serves one of them): take it out of the script"


class NsysWindow:
    """Opens and closes the range of `nsys profile -c cudaProfilerApi` round the light phase.

    torch.profiler must not run inside nsys, so the cost of a traced call is measured by hand: tiny launches, bare
    before the range and traced at its start, in front of its first step. The recording is in nsys's own file.
    """

    def __init__(self) -> None:
        self.problem = ""
        self.costs = Costs()
        self.opened = False  # whether there is a recording
        self._running = False
        self._bare_ns: float | None = None
        self._patches = Patches()

    def measure_costs(self) -> None:
        """The bare half; `start` does the other."""
        self._bare_ns = launch_cost()

    def start(self) -> bool:
        """Begin to record; False where a torch.profiler of the user's is running: CUPTI serves one of the two."""
        if profiler_running():
            self.problem = f"a torch.profiler runs in the loop. {_ONE_CLIENT}"
            return False
        if not cuda_active():
            self.problem = "the loop does not use CUDA"
            return False
        self._watch_for_others()
        try:
            _cudart().cudaProfilerStart()
            self._running = self.opened = True
            if self._bare_ns is not None:
                with annotate("perfdoctor: cost of a traced launch"):
                    traced_ns = launch_cost()
                self.costs = Costs(call_ns=max(round(traced_ns - self._bare_ns), 0), measured=True)
        except RuntimeError as error:
            self.problem = f"the profiler API of CUDA did not start: {error}"
        return not self.problem

    def stop(self) -> None:
        """End the recording, once the device has done what it was given. Safe to call twice."""
        self._patches.undo()
        if not self._running:
            return
        self._running = False
        try:
            sys.modules["torch"].cuda.synchronize()
            _cudart().cudaProfilerStop()
        except RuntimeError as error:  # the error that ended the loop comes out here again
            self.problem = f"the profiler API of CUDA did not stop: {error}"

    def capture(self, load: Callable[[Path], Capture]) -> Capture | None:
        """Nothing: nsys writes the recording, after the process has ended."""
        return None

    def _watch_for_others(self) -> None:
        from torch.autograd.profiler import profile

        prepare: Any = profile._prepare_trace

        def prepare_trace(profiler: Any) -> Any:
            self.problem = f"the loop started a torch.profiler meanwhile. {_ONE_CLIENT}"
            return prepare(profiler)

        self._patches.replace(profile, "_prepare_trace", prepare_trace)


def _cudart() -> Any:
    return sys.modules["torch"].cuda.cudart()
