"""How often a step each line was caught by the live hooks, and whether that is every step or now and then."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfdoctor.record.capture import Capture, Hits, Phase, Site

# A line hit in fewer steps than this is no per-step cost: logging every tenth step, an evaluation, a first-step set-up.
# Every second step is one: of 11 watched steps it may be in 5.
REGULAR_SHARE = 0.45
EMULATED = "emulated-device"  # code of the note on a capture whose device was emulated


@dataclass(frozen=True, slots=True, kw_only=True)
class HitCount:
    """One line and kind. `steps_share`: in what share of the watched steps it was hit at all."""

    kind: str
    place: Site
    per_step: float
    steps_share: float
    blocked_ns: int | None  # a step; None where the hooks knew only the moment
    first_only: bool  # hit in the first watched step alone: set-up

    @property
    def regular(self) -> bool:
        return self.steps_share >= REGULAR_SHARE and not self.first_only


def hit_counts(capture: Capture) -> tuple[HitCount, ...]:
    """All lines hit inside steps, most hits first. The phase without a profiler counts where there is one."""
    hits = _of_one_phase(capture.hits)
    # A step that was cut short holds what came behind the loop, and not all of its own.
    cut = np.flatnonzero(capture.steps.complete == 0)
    inside = hits.take((hits.step >= 0) & (hits.site >= 0) & (hits.kind >= 0) & ~np.isin(hits.step, cut))
    if not len(inside):
        return ()
    watched = _watched_steps(capture, inside)
    keys, which = np.unique(np.stack((inside.kind, inside.site)), axis=1, return_inverse=True)
    counts = [_count(capture, inside.take(which.reshape(-1) == i), watched) for i in range(keys.shape[1])]
    return tuple(sorted(counts, key=lambda count: -count.per_step))


def _of_one_phase(hits: Hits) -> Hits:
    for phase in (Phase.SITES, Phase.LIGHT, Phase.FULL):
        chosen = hits.phase == phase
        if chosen.any():
            return hits.take(chosen)
    return hits


def _watched_steps(capture: Capture, inside: Hits) -> int:
    """Steps that ran while the hooks of this phase were on, whether or not they were hit.

    A session's steps are those of its sites phase and, from the first recorded call on, of its recorded phase.
    """
    steps = capture.steps.take(capture.steps.complete > 0)
    number = len(steps)
    if len(capture.calls):
        before = int((steps.end_ns <= capture.calls.start_ns.min()).sum())
        number = before if inside.phase[0] == Phase.SITES else number - before
    return max(number, len(np.unique(inside.step)), 1)


def _count(capture: Capture, hits: Hits, watched: int) -> HitCount:
    steps = np.unique(hits.step)
    lengths = hits.end_ns - hits.start_ns
    # On an emulated device a wait is the CPU doing the arithmetic: no time of a GPU's.
    timed = bool((lengths > 0).any()) and not any(note.code == EMULATED for note in capture.notes)
    return HitCount(
        kind=capture.text(int(hits.kind[0])),
        place=capture.sites[int(hits.site[0])],
        per_step=len(hits) / watched,
        steps_share=len(steps) / watched,
        blocked_ns=round(int(lengths.sum()) / watched) if timed else None,
        first_only=watched >= 3
        and len(steps) == 1
        and int(steps[0]) == int(capture.hits.step[capture.hits.step >= 0].min()),
    )
