"""The line of `self.log` whose value Lightning reads later, when no line of the user's is on the stack any more."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

from perfdoctor.record.call_site import SiteTable
from perfdoctor.watch.patches import Patches

_MODULES = ("pytorch_lightning.core.module", "lightning.pytorch.core.module")


class LoggedMetrics:
    """Keeps, by metric, the site that logged it last. One site lookup for each `self.log`, about 1 us."""

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        self._logged: dict[str, int] = {}
        self._watched: set[str] = set()

    def install(self, patches: Patches) -> None:
        """Watch `LightningModule.log` where Lightning is loaded; does not load it. May be called again later."""
        for name in _MODULES:
            kind: Any = getattr(sys.modules.get(name), "LightningModule", None)
            if kind is not None and name not in self._watched:
                self._watched.add(name)
                patches.replace(kind, "log", self._noting(kind.log))

    def forget(self) -> None:
        """The patches were undone."""
        self._watched.clear()

    def site_of(self, frame: FrameType | None) -> int | None:
        """The site that logged the metric which is being read at `frame`; None where it is not known."""
        while frame is not None:
            code = frame.f_code
            if code.co_name == "metrics" and code.co_filename.endswith("result.py"):
                meta = getattr(frame.f_locals.get("result_metric"), "meta", None)
                return self._logged.get(str(getattr(meta, "name", "")))
            frame = frame.f_back
        return None

    def _noting(self, original: Any) -> Any:
        @functools.wraps(original)
        def log(module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            self._logged[name] = self._sites.at(sys._getframe(1))
            return original(module, name, *args, **kwargs)

        return log
