"""Steps of a running loop with treatments on: their losses from the same state, or their time in a block."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perfdoctor.treat.treatment import Loop, Treatment
from perfdoctor.trial.dropout import without_dropout
from perfdoctor.trial.live_loop import LiveLoop
from perfdoctor.trial.loop_state import LoopState
from perfdoctor.watch.clocks import Stamp, cuda_active, durations

PARITY_STEPS = 8  # a multiple of the small numbers of batches that scripts take in turn
EDGE = 3  # steps at the start of a block that are not counted: there the queues of the block before drain
_SETTLED = 1.5

Steps = Generator[int, Stamp, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreatedBlock:
    """The blocks of both sides: uncounted and counted steps, and whose batches come."""

    edge: int
    counted: int
    replayed: bool

    @property
    def steps(self) -> int:
        return self.edge + self.counted


class TreatedSteps:
    """Each method is a generator: `yield n` lets n steps run and gets the stamp at their end.

    `active`: what the running steps are treated with. `entered`: whether every treatment of the block was entered;
    what fails then is to take it back. `workers`, `queue`: of the loader, on the side that has more.
    """

    def __init__(self, live: LiveLoop, loop: Loop, before: LoopState) -> None:
        self.loop = loop
        self.before = before
        self.active: tuple[Treatment, ...] = ()
        self.entered = False
        self.workers = self.queue = 0
        self._live = live

    def begin(self) -> None:
        """Another treatment is to be tried."""
        self.workers = self.queue = 0

    def compared(
        self, treatments: tuple[Treatment, ...], into: list[float], *, replayed: bool | None, dry: bool
    ) -> Generator[int, Stamp, tuple[bool, list[Stamp]]]:
        """A few steps from the same state on the same batches; their losses into `into`. `dry`: without dropout.

        Gives whether kept batches were replayed (None: as the treatment allows), and the stamps of the steps' ends.
        """
        self._live.restart(replayed=True)
        self.before.restore()
        stamps = []
        with ExitStack() as stack:
            if dry:
                stack.enter_context(without_dropout(self.loop.model))
            same = self._apply(treatments, stack)
            replayed = same if replayed is None else replayed
            self._live.restart(replayed=replayed)
            self._live.listening = True
            for _ in range(PARITY_STEPS):
                stamps.append((yield 1))
            self._live.listening = False
            into += self._live.values()
        return replayed, stamps

    def timed(
        self,
        treatments: tuple[Treatment, ...],
        into: list[NDArray[np.float64]],
        peaks: list[int],
        block: TreatedBlock,
    ) -> Steps:
        """One block; ns of each counted step into `into`, on a GPU the most memory in use into `peaks`.

        Waits for the device at its end.
        """
        measured = self.loop.device.type == "cuda" and cuda_active()
        with ExitStack() as stack:
            self._apply(treatments, stack)
            self._live.restart(replayed=block.replayed)
            if not block.replayed:
                self.before.restore_random()
            stamps = [(yield block.edge)]
            if measured:
                torch.cuda.reset_peak_memory_stats(self.loop.device)
            for _ in range(block.counted):
                stamps.append((yield 1))
            if measured:
                peaks.append(torch.cuda.max_memory_allocated(self.loop.device) - self.before.own_bytes)
            into.append(durations(list(pairwise(stamps))).astype(np.float64))

    def _apply(self, treatments: tuple[Treatment, ...], stack: ExitStack) -> bool:
        """Enter the treatments, in order. Gives whether they leave the loader as it is."""
        self.active, self.entered = treatments, False
        stack.callback(self._leave)
        loop, loader = self.loop, _look_of(self.loop.loader)
        for treatment in treatments:
            loop = stack.enter_context(treatment.applied(loop))
        self.entered = bool(treatments)
        for each in (self.loop.loader, loop.loader):
            self.workers = max(self.workers, getattr(each, "num_workers", 0))
            self.queue = max(self.queue, getattr(each, "num_workers", 0) * (getattr(each, "prefetch_factor", 0) or 0))
        stack.callback(self._live.restart, replayed=True)  # a treated iterator ends before its treatment does
        return bool(_look_of(loop.loader) == loader)

    def _leave(self) -> None:
        self.active = ()


def settled_after(stamps: Sequence[Stamp]) -> int:
    """Steps until the treated loop runs evenly: a treatment may compile or warm up in the first."""
    times = np.diff([stamp.ns for stamp in stamps])
    usual = float(np.median(times[-3:]))
    late = [i for i, ns in enumerate(times) if ns > _SETTLED * usual]
    return max(EDGE, min(late[-1] + 2, PARITY_STEPS) if late else EDGE)


def _look_of(loader: Any) -> Any:
    """What tells whether a treatment has changed the loader."""
    if loader is None:
        return None
    settings = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
    return (id(loader), type(loader), *(getattr(loader, name, None) for name in settings))
