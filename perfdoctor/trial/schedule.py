"""The order of the blocks of a trial: base, an arm, base, another arm, ... each round in the other direction.

Every arm's block has a block without it on both sides, so that a drift in a straight line cancels; a base block serves
both its neighbours. Even rounds visit the arms in order, odd rounds backwards. The first steps of a block are not
counted: there the queues of the block before still drain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BASE = -1
SHORTEST_BLOCK_NS = 60_000_000
_FEWEST_STEPS, _MOST_STEPS = 8, 200
_FEWEST_LONG_STEPS = 4  # of steps that last so long that a block of eight takes more than two seconds
EDGE = 3
MOST_ROUNDS = 16
FEWEST_ROUNDS = 6


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
    """How long the blocks are and how often each arm comes. `edges[i]` is the edge of arm i, `base_edge` of a base."""

    counted: int
    edges: tuple[int, ...]
    base_edges: tuple[int, ...]  # of the base block that follows arm i
    rounds: int

    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in order; the first and the last are base blocks."""
        edge, rows = EDGE, []
        for arm in order(len(self.edges), self.rounds):
            rows.append(Block(arm=BASE, edge=edge, counted=self.counted))
            rows.append(Block(arm=arm, edge=self.edges[arm], counted=self.counted))
            edge = self.base_edges[arm]
        return (*rows, Block(arm=BASE, edge=edge, counted=self.counted)) if rows else ()

    @property
    def steps(self) -> int:
        return sum(block.steps for block in self.blocks())


def order(num_arms: int, rounds: int) -> list[int]:
    """The arms as they come, rounds in alternating direction: 0 1 2, 2 1 0, 0 1 2, ..."""
    forth = list(range(num_arms))
    return [arm for turn in range(rounds) for arm in (forth if turn % 2 == 0 else reversed(forth))]


def counted_steps(step_ns: float, *, multiple: int = 1) -> int:
    """Counted steps of a block: 60 ms at least, eight steps (four long ones), a whole multiple of `multiple`."""
    wanted = math.ceil(SHORTEST_BLOCK_NS / max(step_ns, 1.0))
    fewest = _FEWEST_STEPS if _FEWEST_STEPS * step_ns < 2e9 else _FEWEST_LONG_STEPS
    wanted = min(max(wanted, fewest), _MOST_STEPS)
    return math.ceil(max(wanted, multiple) / multiple) * multiple


def lay_out(
    step_ns: float,
    edges: Sequence[int],
    base_edges: Sequence[int],
    *,
    max_steps: int,
    max_ns: float,
    multiple: int = 1,
) -> Layout:
    """As many rounds as fit in `max_steps` steps and `max_ns`, at most 16. `rounds` is 0 where not even one fits."""
    counted = counted_steps(step_ns, multiple=multiple)
    rounds = 0
    for wanted in range(1, MOST_ROUNDS + 1):
        layout = Layout(counted=counted, edges=tuple(edges), base_edges=tuple(base_edges), rounds=wanted)
        if layout.steps > max_steps or layout.steps * step_ns > max_ns:
            break
        rounds = wanted
    return Layout(counted=counted, edges=tuple(edges), base_edges=tuple(base_edges), rounds=rounds)
