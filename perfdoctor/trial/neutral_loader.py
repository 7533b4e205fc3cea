"""The loader: no fetch while on. The batches are the same either way."""

from __future__ import annotations

import math
from dataclasses import replace

from perfdoctor.trial.loader_replay import LoaderReplay
from perfdoctor.trial.neutraliser import Mode, Neutraliser

_MOST_WORKERS = 16  # of a cycle that a block still holds


class NeutralLoader(Neutraliser):
    """Switches the fetching of a LoaderReplay. Behind its block the workers' full queue is used up, uncounted."""

    modes = (Mode(name="gone", text="a batch that is there already"),)

    def __init__(self, replay: LoaderReplay) -> None:
        super().__init__()
        self._replay = replay
        self._steps = 0

    def refusal(self) -> str:
        if not self._replay.num_fetches:
            return "the loop takes its batches from nothing that can be hooked: use session.batches(loader)"
        per_step = max(self._replay.num_fetches / max(self._steps, 1), 1.0)
        if 1 < self._replay.num_workers <= _MOST_WORKERS:  # they take turns, so that their stalls come in a cycle
            self.modes = (replace(self.modes[0], multiple=self._replay.num_workers, everywhere=True),)
        self.base_edge = 1 + math.ceil(self._replay.queue / per_step)
        return ""

    def switch(self, mode: str) -> None:
        super().switch(mode)
        self._replay.fetching = not mode

    def stepped(self) -> None:
        super().stepped()
        self._steps += self.observing

    def remove(self) -> None:
        self._replay.fetching = True
