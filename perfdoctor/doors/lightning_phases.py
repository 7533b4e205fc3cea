"""Every phase of a Lightning fit as a range: each hook that Lightning calls, by the field's word where it has one."""

from __future__ import annotations

import os
import re
from typing import Any

from torch.autograd import profiler as _profiler

from perfdoctor.doors.windows import Windows
from perfdoctor.watch.annotate import Overlapping
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.plan import Stage

# The hook (the last word of Lightning's name for it) and what it is called on a timeline.
_WORDS = {
    "train_dataloader_next": "data",
    "batch_to_device": "h2d",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_zero_grad": "zero_grad",
    "configure_gradient_clipping": "clip",
    "validation_step": "validation",
    "lr_scheduler_step": "scheduler",
}
_OWNER = re.compile(r"^\[[^\]]*\]")  # "[Strategy]SingleDeviceStrategy.backward"


class LightningPhases:
    """Ranges while a profiler or Nsight Systems listens, from `install` to `remove`.

    Lightning names each hook to its own profiler, whatever kind that is; the ranges are made there. In the CUDA-only
    recording, which times the loop and shows no ranges, none is made.
    """

    def __init__(self, trainer: Any, windows: Windows) -> None:
        self._trainer = trainer
        self._windows = windows
        self._patches = Patches()
        self._open: dict[str, list[Overlapping]] = {}
        self._traced = "NSYS_PROFILING_SESSION_ID" in os.environ

    def install(self) -> None:
        """Begin."""
        profiler, connector = self._trainer.profiler, self._trainer._logger_connector
        start, stop, log_metrics = profiler.start, profiler.stop, connector.log_metrics

        def started(action_name: str) -> None:
            self._begin(action_name)
            start(action_name)

        def stopped(action_name: str) -> None:
            stop(action_name)
            self._end(action_name)

        def logged(*args: Any, **kwargs: Any) -> None:
            self._begin("logging")
            try:
                log_metrics(*args, **kwargs)
            finally:
                self._end("logging")

        self._patches.replace(profiler, "start", started)
        self._patches.replace(profiler, "stop", stopped)
        self._patches.replace(connector, "log_metrics", logged)

    def remove(self) -> None:
        """End every range and take everything back."""
        self._patches.undo()
        for ranges in self._open.values():
            while ranges:
                ranges.pop().end()

    def _is_heard(self) -> bool:
        session = self._windows.session
        if session is not None and session.recorder.stage == Stage.LIGHT:
            return self._traced
        return self._traced or bool(_profiler._is_profiler_enabled)

    def _begin(self, action: str) -> None:
        if self._is_heard():
            opened = Overlapping(phase_name(action))
            opened.begin()
            self._open.setdefault(action, []).append(opened)

    def _end(self, action: str) -> None:
        ranges = self._open.get(action)
        if ranges:
            ranges.pop().end()


def phase_name(action: str) -> str:
    """'[Strategy]DDPStrategy.backward' -> 'backward'; '[Callback]Timer.on_fit_end' -> 'Timer.on_fit_end'."""
    hook = action.rsplit(".", 1)[-1]
    return _WORDS.get(hook) or _OWNER.sub("", action) or action
