"""What every neutraliser is: one suspect that can be switched off and on between two steps of the running loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfdoctor.trial.schedule import EDGE

if TYPE_CHECKING:
    from perfdoctor.trial.call_hooks import CallHooks

OFF = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to neutralise a suspect, an arm of the trial.

    `prediction`: whether it stands for what the fix gives; else it is a bound. `rare`: what it removes happens in few
    steps, so that the mean is estimated and not a median.
    """

    name: str
    text: str  # 'answered with the value of the step before'
    prediction: bool = True
    rare: bool = False
    multiple: int = 1  # counted steps of a block come in multiples of this
    everywhere: bool = False  # those of all blocks, not of this arm's alone


class Neutraliser:
    """A suspect's switch. Its wrappers stay installed with the switch on and off, so that what they cost cancels.

    While off it lets everything run. In the first step of a block that switches it on everything still runs, and is
    remembered; from the second step on it is answered. `edge` and `base_edge` are the uncounted steps of its own
    block and of the block behind it.
    """

    modes: tuple[Mode, ...] = ()
    edge = EDGE
    base_edge = 1

    def __init__(self) -> None:
        self.mode = OFF
        self.step_in_block = 0
        self.observing = True
        self.num_calls = 0  # calls reached while observing

    def install(self, hooks: CallHooks) -> None:
        """Name the calls to hook."""

    def settle(self, edge: int) -> None:
        """Before `refusal`: how many steps the loop takes to run evenly after a switch."""
        self.edge = edge

    def refusal(self) -> str:
        """Asked once, after a few observed steps: why it cannot be neutralised safely, '' where it can."""
        return ""

    def switch(self, mode: str) -> None:
        """Between two steps: begin a block in `mode`, OFF or the name of one of `modes`."""
        self.mode, self.step_in_block = mode, 0

    def stepped(self) -> None:
        """A step ended."""
        self.step_in_block += 1

    def remark(self) -> str:
        """Asked at the end: what is to be said about its arms, '' for nothing."""
        return ""

    def remove(self) -> None:
        """Put back whatever is not a hook. Called once, after everything is off."""

    @property
    def answering(self) -> bool:
        """Whether calls are to be answered, not run."""
        return bool(self.mode) and self.step_in_block > 0


class OrderedCalls(Neutraliser):
    """A neutraliser that tells the calls of one step apart by their order."""

    def __init__(self) -> None:
        super().__init__()
        self._ordinal = 0

    def stepped(self) -> None:
        super().stepped()
        self._ordinal = 0

    def _next_ordinal(self) -> int:
        """The place of this call among those of the step, from 0."""
        self._ordinal += 1
        return self._ordinal - 1
