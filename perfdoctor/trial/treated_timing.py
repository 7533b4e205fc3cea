"""The time of a treatment: blocks without, with, without, with, ... and without, and paired differences.

They may be taken up again later: the blocks of each stretch are paired among themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from perfdoctor.treat.treatment import Treatment
from perfdoctor.trial.estimate import FEWEST_PAIRS, Estimate, claimed, estimate, paired
from perfdoctor.trial.treated_steps import Steps, TreatedBlock, TreatedSteps
from perfdoctor.trial.verdict import Parity, Side, Verdict, judged
from perfdoctor.watch.clocks import Stamp

_Spans = list[tuple[Stamp, Stamp]]  # around the counted steps of each block


class TreatedTiming:
    """Of `treatments` together, in blocks like `block`. `doing` says where it is."""

    def __init__(self, treatments: tuple[Treatment, ...], parity: Parity, block: TreatedBlock) -> None:
        self.name = " + ".join(treatment.name for treatment in treatments)
        self.treatments = treatments
        self.doing = ""
        self._parity = parity
        self._block = block
        self._stretches: list[tuple[_Spans, _Spans]] = []  # without, with
        self._peaks: dict[bool, list[int]] = {True: [], False: []}

    def run(self, treated: TreatedSteps, ends: Callable[[int, Estimate], bool]) -> Steps:
        """A stretch of rounds, six at least, until `ends(number of rounds in it, what was saved so far)`."""
        off: _Spans = []
        on: _Spans = []
        self._stretches.append((off, on))
        yield from treated.timed((), off, self._peaks[False], self._block)
        for number in itertools.count(1):
            self.doing = f"its blocks were timed, round {number}"
            yield from treated.timed(self.treatments, on, self._peaks[True], self._block)
            yield from treated.timed((), off, self._peaks[False], self._block)
            if number >= FEWEST_PAIRS and ends(number, self.saving()):
                return

    @property
    def is_enough(self) -> bool:
        """Whether what was measured so far, cut short or not, suffices for a verdict."""
        return len(self._differences()) >= FEWEST_PAIRS

    def saving(self) -> Estimate:
        """ns a step, as it is measured. Waits for the device."""
        return estimate(self._differences())

    def verdict(self) -> Verdict:
        """By all whole rounds. Waits for the device."""
        before, after = (Side.of(spans, peaks, self._block.counted) for spans, peaks in self._sides())
        saving = claimed(self.saving(), float(np.median(before.times_ns)))
        lines = tuple(dict.fromkeys(line for treatment in self.treatments for line in treatment.lines))
        return judged(self.name, self._parity, before, after, saving, lines)

    def _sides(self) -> tuple[tuple[_Spans, list[int]], tuple[_Spans, list[int]]]:
        without, treated = (list(itertools.chain(*spans)) for spans in zip(*self._stretches, strict=True))
        return (without, self._peaks[False]), (treated, self._peaks[True])

    def _differences(self) -> NDArray[np.float64]:
        return np.concatenate([np.zeros(0), *(self._paired(off, on) for off, on in self._stretches)])

    def _paired(self, off: _Spans, on: _Spans) -> NDArray[np.float64]:
        """Of whole rounds: a block with the treatment that was cut off, or the one behind it, leaves it out."""
        num = min(len(on), max(len(off) - 1, 0))
        before = Side.of(off[: num + 1], (), self._block.counted).times_ns
        return paired(before[:-1], Side.of(on[:num], (), self._block.counted).times_ns, before[1:])
