"""The loader: no fetch while on. The batches are the same either way."""

from __future__ import annotations

import math

from perfdoctor.trial.loader_replay import LoaderReplay
from perfdoctor.trial.neutraliser import Mode, Neutraliser
from perfdoctor.trial.schedule import EDGE


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
        self.base_edge = EDGE + math.ceil(self._replay.queue / per_step)
        return ""

    def switch(self, mode: str) -> None:
        super().switch(mode)
        self._replay.fetching = not mode

    def stepped(self) -> None:
        super().stepped()
        self._steps += self.observing

    def remove(self) -> None:
        self._replay.fetching = True
