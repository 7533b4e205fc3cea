"""torch's sync debug mode, kept on "warn" for us while user code sees and sets the mode of its own."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

from perfdoctor.watch.patches import Patches

_WARN, _ERROR = 1, 2


class SyncMode:
    """The real mode is "warn" between `enter` and `leave`; `wanted` is what the user's code has set last."""

    def __init__(self) -> None:
        self.wanted = 0
        self.answering = False  # a warning on its way to the user's own filters
        self._patches = Patches()
        self._set: Any = None
        self._registries: dict[str, dict[Any, Any]] = {}

    def enter(self) -> None:
        """Switch to "warn". Does nothing on a build or in a process without CUDA."""
        torch: Any = sys.modules["torch"]
        if self._set is not None or not torch.cuda.is_initialized():
            return
        self._set = torch._C._cuda_set_sync_debug_mode
        self.wanted = int(torch._C._cuda_get_sync_debug_mode())
        with warnings.catch_warnings():  # torch says once that the mode is a prototype: not the user's concern
            warnings.simplefilter("ignore")
            self._set(_WARN)
        self._patches.replace(torch._C, "_cuda_set_sync_debug_mode", self._want)
        self._patches.replace(torch._C, "_cuda_get_sync_debug_mode", lambda: self.wanted)

    def leave(self) -> None:
        """Hand the mode over as the user's code has set it."""
        if self._set is None:
            return
        self._patches.undo()
        self._set(self.wanted)
        self._set = None

    def answer(self, text: str, frame: FrameType) -> bool:
        """Do what the user's own mode asks for at a sync: warn or raise. True: nothing is left to do.

        Raises:
            RuntimeError: the user's code had set the mode "error".
        """
        if self.wanted == _ERROR:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.wanted == _WARN:
            file = frame.f_code.co_filename
            # A registry apart from the module's: there the interpreter would find the warning and not ask us again.
            registry = self._registries.setdefault(file, {})
            self.answering = True
            try:
                warnings.warn_explicit(text, UserWarning, file, frame.f_lineno or 0, registry=registry)
            finally:
                self.answering = False
        return True

    def _want(self, mode: int) -> None:
        if mode not in (0, _WARN, _ERROR):
            raise RuntimeError(f"invalid value of debug_mode: {mode}, expected 0 (default), 1 (warn) or 2 (error)")
        self.wanted = int(mode)
