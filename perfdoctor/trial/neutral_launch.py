"""Launch cost: a graph of the model where one can be made, and torch's clip exchanged for ours where the loop clips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from perfdoctor.trial.call_hooks import CallHooks
from perfdoctor.trial.neutral_clip import NeutralClip
from perfdoctor.trial.neutral_graph import NeutralGraph
from perfdoctor.trial.neutraliser import OFF, Neutraliser


class NeutralLaunch(Neutraliser):
    """Two neutralisers of one finding, an arm each; an arm that cannot be is said in the text of the other."""

    def __init__(self, optimizers: Sequence[Any], batch: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.graph = NeutralGraph(optimizers, batch)
        self.clip = NeutralClip(optimizers, "the loop does not clip")
        self._parts: tuple[Neutraliser, ...] = (self.graph, self.clip)

    def install(self, hooks: CallHooks) -> None:
        for part in self._parts:
            part.install(hooks)

    def settle(self, edge: int) -> None:
        super().settle(edge)
        for part in self._parts:
            part.settle(edge)

    def refusal(self) -> str:
        why = self.graph.refusal()
        clip = () if self.clip.refusal() else self.clip.modes
        for part in self._parts:
            part.observing = False
        if not why:
            self.modes = (*self.graph.modes, *clip)
            return ""
        self.modes = tuple(replace(mode, text=f"{mode.text} (no CUDA graph of the model: {why})") for mode in clip)
        return "" if clip else f"no CUDA graph of the model: {why}"

    def switch(self, mode: str) -> None:
        super().switch(mode)
        for part in self._parts:
            part.switch(mode if mode in [each.name for each in part.modes] else OFF)

    def stepped(self) -> None:
        super().stepped()
        for part in self._parts:
            part.stepped()

    def remark(self) -> str:
        return self.graph.remark()

    def remove(self) -> None:
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.remove)
