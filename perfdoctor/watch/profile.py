"""A window of torch.profiler, kept out of the way of the user's own."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from perfdoctor.errors import PerfDoctorError
from perfdoctor.record.capture import Capture, Costs
from perfdoctor.watch.patches import Patches

LIGHT, FULL = ("CUDA",), ("CPU", "CUDA")
_TEARDOWN = "TEARDOWN_CUPTI"
_CALLS_UNTIL_DETACHED = 5


class Window(Protocol):
    """A tracer that a phase of a session runs under. `costs` is what tracing costs, once it was measured."""

    problem: str  # why there is no recording
    costs: Costs

    def measure_costs(self) -> None:
        """Before `start`: what a traced call costs here. Needs CUDA; waits for the device."""

    def start(self) -> bool:
        """Begin to record; False, with `problem` set, where that cannot be."""

    def stop(self) -> None:
        """End the recording. Safe to call twice."""

    def capture(self, load: Callable[[Path], Capture]) -> Capture | None:
        """The recording read back; None where there is none, or it is somebody else's."""


class ProfileWindow:
    """One recording from `start` to `stop`, without stacks.

    The lines come from the call-site hooks, and stacks slow a step down up to 3.3 times. Starting and stopping wait
    for the device, so both happen between steps, at the edge of a phase, never inside a step that is measured.
    """

    def __init__(self, activities: Sequence[str]) -> None:
        self._activities = tuple(activities)
        self._profiler: Any = None
        self._patches = Patches()
        self._folder = ""
        self._delete: Callable[[], Any] = lambda: None
        self.problem = ""  # why there is no recording
        self.costs = Costs()

    @property
    def _file(self) -> Path:
        return Path(self._folder) / "recording.json"

    @property
    def running(self) -> bool:
        return self._profiler is not None and not self.problem and bool(self._patches)

    def measure_costs(self) -> None:
        """The cost of a traced call and of a traced op, under profiles of its own."""
        from perfdoctor.watch.calibration import measure_costs

        self.costs = measure_costs()

    def start(self) -> bool:
        """Begin to record; False where a profiler of the user's is running."""
        from torch import profiler

        if profiler_running():
            self.problem = "another torch.profiler is running in the loop"
            return False
        activities = [getattr(profiler.ProfilerActivity, name) for name in self._activities]
        try:
            with warnings.catch_warnings():  # torch warns about cycles, of which there is one
                warnings.simplefilter("ignore")
                self._profiler = profiler.profile(activities=activities, experimental_config=_sync_events())
                self._profiler.start()
        except (RuntimeError, AssertionError) as error:
            self.problem = f"torch.profiler did not start: {error}"
            return False
        self._yield_to_others()
        return True

    def stop(self) -> None:
        """End the recording and write it to a temporary file.

        At once: of a recording exported after another one had run, torch 2.11 gave times that no event can have.
        """
        if not self._patches:
            return
        self._patches.undo()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._profiler.stop()
                self._folder = tempfile.mkdtemp(prefix="perfdoctor_")
                # Deleted with this object at the latest, and without the warning that a TemporaryDirectory gives then.
                self._delete = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
                self._profiler.export_chrome_trace(str(self._file))
        except (RuntimeError, OSError) as error:
            self.problem = f"torch.profiler did not stop: {error}"
        self._profiler = None

    def capture(self, load: Callable[[Path], Capture]) -> Capture | None:
        """The recording read back; None, with `problem` set, where there is none. The file is deleted."""
        if not self._folder or self.problem:
            self._delete()
            return None
        try:
            return load(self._file)
        except (RuntimeError, OSError, PerfDoctorError) as error:
            self.problem = f"the recording could not be read: {error}"
            return None
        finally:
            self._delete()
            self._folder = ""

    def _yield_to_others(self) -> None:
        # Kineto serves one profiler at a time. If the loop starts its own, ours ends first.
        from torch.autograd.profiler import profile

        prepare: Any = profile._prepare_trace

        def prepare_trace(profiler: Any) -> Any:
            self.stop()
            self.problem = "the loop started a torch.profiler of its own"
            return prepare(profiler)

        self._patches.replace(profile, "_prepare_trace", prepare_trace)


def detach_tracer() -> None:
    """After the last recording: have CUPTI leave the process. It stays by default, and every launch goes through it.

    Kineto detaches it at the end of a recording where TEARDOWN_CUPTI=1 (a setting of yours is left alone), in a thread
    of its own and at the next CUDA call. So here is a recording of nothing and a few such calls. Not before CUDA 12.6,
    where graphs broke by it (pytorch/pytorch#150957). Waits for the device; 60 ms.
    """
    from torch import profiler

    torch: Any = sys.modules["torch"]
    if _TEARDOWN in os.environ or _cuda_version() < (12, 6) or profiler_running():
        return
    os.environ[_TEARDOWN] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]):
                torch.cuda.synchronize()
        for _ in range(_CALLS_UNTIL_DETACHED):
            torch.cuda.synchronize()
            time.sleep(0.01)
    finally:
        os.environ.pop(_TEARDOWN, None)


def _cuda_version() -> tuple[int, ...]:
    version = sys.modules["torch"].version.cuda
    return tuple(int(part) for part in version.split(".")[:2]) if version else (0,)


def profiler_running() -> bool:
    """Whether a torch.profiler runs in this process: Kineto serves one at a time, and ours would end the user's."""
    return bool(sys.modules["torch"].autograd.profiler._is_profiler_enabled)


def _sync_events() -> Any:
    config: Any = sys.modules["torch"]._C._profiler._ExperimentalConfig
    try:
        return config(enable_cuda_sync_events=True)
    except TypeError:  # older torch
        return None
