"""Live call-site hooks: every sync and slow copy of a running loop, with its line, as hits in a HitLog."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

from perfdoctor.record.call_site import HitLog, own_frame
from perfdoctor.watch.call_kind import call_kind
from perfdoctor.watch.copy_hooks import CopyHooks
from perfdoctor.watch.logged_metrics import LoggedMetrics
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.sync_mode import SyncMode
from perfdoctor.watch.warning_filter import WarningCatcher

SYNC_MARKER = "called a synchronizing CUDA operation"
# torch says once, when the mode is first set, that the mode is a prototype: our doing, not the user's.
_PROTOTYPE_MARKER = "Synchronization debug mode is a prototype"


class CallSiteHooks:
    """Catches syncs while installed. `caught_warnings` can be had alone: it touches nothing that torch.compile sees.

    A sync that torch reports costs about 2 us here once its site is known. The moment that is noted is the end of the
    call: torch warns when the C++ function returns.
    """

    def __init__(self, log: HitLog) -> None:
        self._log = log
        self._kinds: dict[int, str] = {}
        self._mode = SyncMode()
        self._catcher = WarningCatcher((SYNC_MARKER, _PROTOTYPE_MARKER), self._caught)
        self._patches = Patches()
        self._copies = CopyHooks(log)
        self._metrics = LoggedMetrics(log.sites)
        self.paused = False  # while perfdoctor itself touches the device
        self._warning = False
        self._patched = False

    @property
    def user_mode(self) -> int:
        """The sync debug mode that the user's code asked for."""
        return self._mode.wanted

    def catch_warnings(self) -> None:
        """Count what torch itself reports. Needs an initialised CUDA context; without one does nothing."""
        if not self._warning:
            self._catcher.install()
            self._warning, paused = True, self.paused
            self.paused = True
            self._mode.enter()
            self.paused = paused

    def patch_calls(self) -> None:
        """Count as well what torch does not report: device and event synchronisation, silent copies, empty_cache."""
        if self._patched:
            return
        torch: Any = sys.modules["torch"]
        for owner, name, kind in (
            (torch._C, "_cuda_synchronize", "cuda_synchronize"),
            (torch._C, "_cuda_emptyCache", "empty_cache"),
            (torch.cuda.Event, "synchronize", "cuda_synchronize"),
        ):
            if hasattr(owner, name):
                self._patches.replace(owner, name, self._timed(getattr(owner, name), kind))
        self._copies.install(self._patches)
        self._metrics.install(self._patches)
        self._patched = True

    def heal(self) -> None:
        """Once a step: stand first again where user code replaced the filters, and watch what was imported late."""
        if self._warning:
            self._catcher.heal()
        if self._patched:
            self._metrics.install(self._patches)

    def remove(self) -> None:
        """Take everything back."""
        self._patches.undo()
        self._copies.forget()
        self._metrics.forget()
        if self._warning:
            self._mode.leave()
            self._catcher.remove()
        self._warning = self._patched = False

    def _caught(self, text: str) -> bool:
        now = time.time_ns()
        if self.paused:
            return True
        if self._mode.answering:
            return False
        frame: Any = sys._getframe(2)  # the innermost Python frame of the call that warned
        site = self._log.sites.at(frame)
        kind = self._kinds.get(site)
        if kind is None:
            kind = self._kinds[site] = call_kind(own_frame(frame))
        if kind == "logging":
            site = self._metrics.site_of(frame) or site
        if self._copies.pending:
            self._copies.arrived()
        self._log.add_at(kind, site, now, now)
        return self._mode.wanted == 0 or self._mode.answer(text, frame)

    def _timed(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        compiling = sys.modules["torch"].compiler.is_compiling

        @functools.wraps(original)
        def synchronizing(*args: Any, **kwargs: Any) -> Any:
            if compiling():  # traced: to torch.compile this is the original
                return original(*args, **kwargs)
            start = time.time_ns()
            try:
                return original(*args, **kwargs)
            finally:
                if self._patched and not self.paused:
                    self._copies.arrived()
                    self._log.add(kind, sys._getframe(1), start, time.time_ns())

        return synchronizing
