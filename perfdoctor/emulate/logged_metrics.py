"""The line that logged a metric which Lightning reads later, when no line of the user's is on the stack any more.

`self.log("loss", loss, prog_bar=True)` is where the read comes from; it happens at the end of the batch, deep inside
`trainer.fit`. From the first such read on, the lines of `self.log` are kept by name, and reads are charged to them.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

from perfdoctor.emulate.patches import Patches
from perfdoctor.record.call_site import HitLog

_MODULES = ("pytorch_lightning.core.module", "lightning.pytorch.core.module")
_patches: list[Patches] = []
_watched: set[str] = set()
_frames: dict[str, dict[int, int]] = {}  # metric -> id of the log -> site
_logs: list[HitLog] = []


def install(patches: Patches) -> None:
    """Be ready to watch `LightningModule.log` until `patches` is undone."""
    _patches.append(patches)
    patches.on_undo(_forget)


def _forget() -> None:
    _patches.clear()
    _watched.clear()
    _frames.clear()
    _logs.clear()


def logged_site(frame: FrameType, log: HitLog) -> int | None:
    """The site in `log` of the `self.log` call whose metric is being read at `frame`, where that is known."""
    _watch()
    if log not in _logs:
        _logs.append(log)
    return _frames.get(_metric_name(frame), {}).get(id(log))


def _metric_name(frame: FrameType | None) -> str:
    while frame is not None:
        if frame.f_code.co_name == "metrics" and frame.f_code.co_filename.endswith("result.py"):
            metric = frame.f_locals.get("result_metric")
            return str(getattr(getattr(metric, "meta", None), "name", ""))
        frame = frame.f_back
    return ""


def _watch() -> None:
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is not None and name not in _watched and _patches:
            _watched.add(name)
            _patches[-1].set(module.LightningModule, "log", _noted(module.LightningModule.log))


def _noted(original: Any) -> Any:
    @functools.wraps(original)
    def log(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        _frames[name] = {id(log): log.sites.at(sys._getframe(1)) for log in _logs}
        return original(self, name, *args, **kwargs)

    return log
