"""The time of a treatment: blocks without, with, without, with, ... and without, and paired differences.

They may be taken up again later: the blocks of each stretch are paired among themselves.

Up to a block of steps that count for nothing stand in front of each block without, drawn with a fixed seed: what comes
every tenth step (a line of the log, an evaluation) would else always meet the same side. A wait of 20 ms there was once
1.5 ms a step that bf16 had saved. Of treatments that act in every step alike, what strikes fewer than one step in
thirteen is cut, on both sides at the same height (estimate.steady_means).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from perfdoctor.treat.kept_lines import merged
from perfdoctor.treat.treatment import Treatment
from perfdoctor.trial.estimate import FEWEST_PAIRS, Estimate, claimed, estimate, paired, plain_means, steady_means
from perfdoctor.trial.parity import Parity
from perfdoctor.trial.treated_steps import Steps, TreatedBlock, TreatedSteps
from perfdoctor.trial.verdict import Side, Verdict, joined_name, judged

_Blocks = list[NDArray[np.float64]]  # ns of each counted step
# Codes of what every step pays for alike. A loader's workers, a read or a collection strike some steps only.
_OF_EVERY_STEP = frozenset({"small-kernels", "launch-bound", "fusion", "no-tensor-cores"})


class TreatedTiming:
    """Of `treatments` together, in blocks like `block`. `doing` says where it is."""

    def __init__(self, treatments: tuple[Treatment, ...], parity: Parity, block: TreatedBlock) -> None:
        self.name = joined_name(treatments)
        self.treatments = treatments
        self.doing = ""
        self._parity = parity
        self._block = block
        self._lines: tuple[str, ...] = ()  # in the loop as it is
        self._setting = ""
        self._is_steady = all(_OF_EVERY_STEP.issuperset(each.cures) for each in treatments)
        self._stretches: list[tuple[_Blocks, _Blocks]] = []  # without, with
        self._peaks: dict[bool, list[int]] = {True: [], False: []}
        self._rng = np.random.default_rng(0)

    def run(self, treated: TreatedSteps, ends: Callable[[int, Estimate], bool]) -> Steps:
        """A stretch of rounds, six at least, until `ends(number of rounds in it, what was saved so far)`."""
        off: _Blocks = []
        on: _Blocks = []
        self._stretches.append((off, on))
        self._lines = merged(line for each in self.treatments for line in each.lines_for(treated.loop))
        self._setting = ", ".join(filter(None, (each.setting_for(treated.loop) for each in self.treatments)))
        yield from treated.timed((), off, self._peaks[False], self._block)
        for number in itertools.count(1):
            self.doing = f"its blocks were timed, round {number}"
            yield from treated.timed(self.treatments, on, self._peaks[True], self._block)
            if skipped := int(self._rng.integers(0, self._block.steps + 1)):
                yield skipped
            yield from treated.timed((), off, self._peaks[False], self._block)
            if number >= FEWEST_PAIRS and ends(number, self.saving()):
                return

    @property
    def is_enough(self) -> bool:
        """Whether what was measured so far, cut short or not, suffices for a verdict."""
        return sum(map(_num_rounds, self._stretches)) >= FEWEST_PAIRS

    def saving(self) -> Estimate:
        """ns a step, as it is measured."""
        rows = self._stretch_means()
        return estimate(np.concatenate([paired(off[:-1], on, off[1:]) for off, on in rows if on]))

    def verdict(self) -> Verdict:
        """By all whole rounds."""
        without, treated = (list(itertools.chain(*means)) for means in zip(*self._stretch_means(), strict=True))
        before, after = (
            Side(times_ns=tuple(means), counted=self._block.counted, peak_bytes=max(self._peaks[is_on], default=None))
            for means, is_on in ((without, False), (treated, True))
        )
        saving = claimed(self.saving(), float(np.median(before.times_ns)))
        return judged(self.name, self._parity, before, after, saving, self._lines, self._setting)

    def _stretch_means(self) -> list[tuple[list[float], list[float]]]:
        """Mean steps of the blocks of each stretch, without and with, of whole rounds: one without more."""
        kept = [(off[: num + 1], on[:num]) for off, on in self._stretches for num in [_num_rounds((off, on))]]
        blocks = [(0, steps) for sides in kept for side in sides for steps in side]  # one arm: cut at the same height
        means = (mean for _, mean in (steady_means if self._is_steady else plain_means)(blocks))
        return [(list(islice(means, len(off))), list(islice(means, len(on)))) for off, on in kept]


def _num_rounds(stretch: tuple[_Blocks, _Blocks]) -> int:
    """A block with the treatment that was cut off, or the one behind it, leaves the round out."""
    off, on = stretch
    return min(len(on), max(len(off) - 1, 0))
