"""Python's garbage collector: switched off while on."""

from __future__ import annotations

import gc

from perfdoctor.trial.neutraliser import Mode, Neutraliser


class NeutralGarbage(Neutraliser):
    """Automatic collections, in blocks without them. Rare and long: their mean is what counts."""

    modes = (Mode(name="gone", text="the collector is off", rare=True),)

    def __init__(self) -> None:
        super().__init__()
        self._enabled = gc.isenabled()

    def refusal(self) -> str:
        return "" if self._enabled else "the collector is off already"

    def switch(self, mode: str) -> None:
        super().switch(mode)
        if not self._enabled:
            return
        if mode:
            gc.disable()
        else:
            gc.enable()

    def remove(self) -> None:
        if self._enabled:
            gc.enable()
