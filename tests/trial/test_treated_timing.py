"""Blocks with and without in turn, driven by stamps of the test's own: what comes every Nth step meets both sides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from perfdoctor.treat.treatment import Loop, Numerics, Treatment
from perfdoctor.trial.live_loop import LiveLoop
from perfdoctor.trial.loop_state import LoopState
from perfdoctor.trial.parity import Parity
from perfdoctor.trial.treated_steps import TreatedBlock, TreatedSteps
from perfdoctor.trial.treated_timing import TreatedTiming
from perfdoctor.trial.verdict import Verdict
from perfdoctor.watch.clocks import Stamp

MS = 1_000_000
KEPT = Parity(kept=True, text="losses equal bit for bit", difference=0.0, repeat=0.0, num_losses=8)


@contextmanager
def _nothing(loop: Loop) -> Iterator[Loop]:
    yield loop


NO_DIFFERENCE = "no difference: the interval holds zero"


def _verdict(period: int, first: int, rounds: int, *, code: str = "fusion", saved_ms: int = 0) -> Verdict:
    """Of steps of 5 ms, every `period`th 25 ms longer, of which those with the treatment save `saved_ms`."""
    treatment = Treatment(
        name="plain", cures=(code,), numerics=Numerics(), refuses=lambda _: None, applied=_nothing, lines=()
    )
    loop = Loop(device=torch.device("cpu"))
    treated = TreatedSteps(LiveLoop(), loop, LoopState.take(loop, []))
    timing = TreatedTiming((treatment,), KEPT, TreatedBlock(edge=3, counted=12, replayed=True))
    steps = timing.run(treated, lambda number, _: number >= rounds)
    now = step = 0
    try:
        left = next(steps)
        while True:
            for _ in range(left):
                step += 1
                now += 5 * MS + (25 * MS if step % period == first else 0) - (saved_ms * MS if treated.active else 0)
            left = steps.send(Stamp(now, None))
    except StopIteration:
        return timing.verdict()


@pytest.mark.parametrize("rounds", [6, 12, 16])
@pytest.mark.parametrize(("code", "most"), [("fusion", 0.0), ("host-sync", 0.05)])
def test_what_comes_every_nth_step_is_no_saving(code: str, most: float, rounds: int) -> None:
    # With blocks of 15 steps in strict turn every 30th step falls on the same side each time. Where what is rare
    # counts, chance may claim as often as its 95 % allow.
    tried = [(period, first) for period in (7, 10, 13, 15, 20, 30, 60) for first in range(period)]
    claims = [each for each in tried if _verdict(*each, rounds, code=code).reason != NO_DIFFERENCE]
    assert len(claims) <= most * len(tried), claims


@pytest.mark.parametrize("first", [0, 7, 21])
def test_a_saving_is_found_beside_it(first: int) -> None:
    verdict = _verdict(30, first, 6, saved_ms=3)
    assert verdict.accepted, verdict.reason
    assert verdict.saving is not None
    # What strikes one step in thirty is cut off on both sides: what is left is the 3 ms.
    assert verdict.saving.mid_ns == pytest.approx(3 * MS, rel=0.01)
