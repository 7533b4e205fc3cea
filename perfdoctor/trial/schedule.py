"""The order of the blocks of a trial: base, an arm, base, another arm, ... each round in the other direction.

Every arm's block has a block without it on both sides, so that a drift in a straight line cancels; a base block serves
both its neighbours. Even rounds visit the arms in order, odd rounds backwards. The first steps of a block are not
counted: there the queues of the block before still drain. One base block in four begins one to eight steps later, drawn
with a fixed seed: what comes every tenth step would else always meet the same arm.

Blocks are short: a host's speed wanders within some 100 ms. On simulated hosts (tests/trial/test_estimate.py) blocks of
four steps and one uncounted halve the error of twelve and three in the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BASE = -1
SHORTEST_BLOCK_NS = 60_000_000
CYCLE = 4  # counted steps come in multiples: each block then trains on the same cached batches
_MOST_STEPS = 200
EDGE = 3
MOST_ROUNDS = 400
FEWEST_ROUNDS = 6
_MOST_EXTRA, _EXTRA_SHARE = 8, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`edge` steps that are not counted, then `counted` ones, with `arm` on (BASE: none)."""

    arm: int
    edge: int
    counted: int

    @property
    def steps(self) -> int:
        return self.edge + self.counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How long the blocks are and how often each arm comes.

    `edges[i]` is the edge of arm i, `base_edges[i]` that of the base block behind it, `arm_counted[i]` its counted
    steps where they are not `counted`.
    """

    counted: int
    edges: tuple[int, ...]
    base_edges: tuple[int, ...]  # of the base block that follows arm i
    rounds: int
    arm_counted: tuple[int, ...] = ()
    extra: int = _MOST_EXTRA

    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in order; the first and the last are base blocks."""
        if not self.rounds or not self.edges:
            return ()
        rng = np.random.default_rng(0)
        arms = order(len(self.edges), self.rounds)
        late = rng.random(len(arms) + 1) < _EXTRA_SHARE
        extras = (late * rng.integers(1, self.extra + 1, len(arms) + 1)).tolist() if self.extra else [0] * len(late)
        edge, rows = EDGE, []
        for arm, extra in zip(arms, extras, strict=False):
            rows.append(Block(arm=BASE, edge=edge + extra, counted=self.counted))
            rows.append(Block(arm=arm, edge=self.edges[arm], counted=self._counted_of(arm)))
            edge = self.base_edges[arm]
        return (*rows, Block(arm=BASE, edge=edge + extras[-1], counted=self.counted))

    def _counted_of(self, arm: int) -> int:
        return self.arm_counted[arm] if self.arm_counted else self.counted

    @property
    def steps(self) -> int:
        return sum(block.steps for block in self.blocks())

    @property
    def round_steps(self) -> float:
        """Steps of a round on average."""
        arms = range(len(self.edges))
        own = sum(self.edges[arm] + self._counted_of(arm) + self.base_edges[arm] for arm in arms)
        return own + len(self.edges) * (self.counted + _EXTRA_SHARE * (self.extra + 1) / 2)


def order(num_arms: int, rounds: int) -> list[int]:
    """The arms as they come, rounds in alternating direction: 0 1 2, 2 1 0, 0 1 2, ..."""
    forth = list(range(num_arms))
    return [arm for turn in range(rounds) for arm in (forth if turn % 2 == 0 else reversed(forth))]


def counted_steps(step_ns: float, *, multiple: int = 1) -> int:
    """Counted steps of a block: 60 ms at least, a multiple of four and of `multiple`."""
    wanted = min(math.ceil(SHORTEST_BLOCK_NS / max(step_ns, 1.0)), _MOST_STEPS)
    unit = math.lcm(multiple, CYCLE)
    return math.ceil(max(wanted, 1) / unit) * unit


def lay_out(
    step_ns: float,
    edges: Sequence[int],
    base_edges: Sequence[int],
    *,
    max_steps: int,
    max_ns: float,
    multiple: int = 1,
    multiples: Sequence[int] = (),
) -> Layout:
    """As many rounds as fit in `max_steps` steps and `max_ns`, at most 400. `rounds` is 0 where not even one fits.

    `multiple` is for all blocks, `multiples[i]` for those of arm i alone.
    """
    counted = counted_steps(step_ns, multiple=multiple)
    own = tuple(counted_steps(step_ns, multiple=math.lcm(multiple, each)) for each in multiples)

    def layout(rounds: int) -> Layout:
        return Layout(counted=counted, edges=tuple(edges), base_edges=tuple(base_edges), rounds=rounds, arm_counted=own)

    if not edges:
        return layout(0)
    most = min(max_steps, max_ns / max(step_ns, 1.0))
    rounds = min(MOST_ROUNDS, max(0, round(most / layout(1).round_steps)) + 2)
    while rounds and layout(rounds).steps > most:
        rounds -= 1
    return layout(rounds)
