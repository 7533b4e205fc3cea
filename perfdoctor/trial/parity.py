"""Whether a treated loop computes the same: its losses against those of the loop as it is. No torch in here.

Kernels that add in no fixed order differ by chance: of eleven runs of a GPT with cuDNN's attention on an H200 several
pairs were equal bit for bit, the others 6e-5 apart; once five untreated runs were equal and the treated one, of a
treatment that changes no number, 2.3e-5 off. So a difference as small as that is held against more untreated runs, then
looked for in more treated ones: a changed number is there in each of them. Where a run differs by chance p, and the
treatment changes nothing, it is accused with chance (1-p)^5 p times that of three more of four: 0.6 % at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

from perfdoctor.units import format_plural

if TYPE_CHECKING:
    from perfdoctor.treat.treatment import Treatment

# A loop that differs from itself by more than this share of its loss, and more than the treatment may change it, was
# not given the same batches: at a loss of ln 10 for ten classes, other batches differ by 2 %.
_REPEATS = 1e-3
# Runs at most: of the untreated loop, and of the treated one.
MOST_BASES = 5
_MOST_TREATED = 5
_ACCUSED = 4  # of those, where the difference is: Fisher's exact test gives 2.4 % for 4 of 5 against 0 of 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Losses of the treated loop against those of the loop as it is: same state, same batches.

    `kept` is None where they could not be compared. `repeat` is what the untreated loop differs from itself by.
    `excuse`: why they may differ though the loop computes the same.
    """

    kept: bool | None
    text: str
    difference: float | None = None  # largest, absolute
    repeat: float | None = None
    num_losses: int = 0
    excuse: str = ""


NOT_COMPARED = Parity(kept=None, text="not compared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What losses may differ by under treatments: `atol + rtol * |loss|`, and why. `other_draws`: see `Numerics`."""

    rtol: float = 0.0
    atol: float = 0.0
    why: str = ""
    other_draws: str = ""

    @classmethod
    def of(cls, treatments: Sequence[Treatment]) -> Allowed:
        """Of treatments applied together."""
        numerics = [treatment.numerics for treatment in treatments]
        return cls(
            rtol=sum(each.rtol for each in numerics),
            atol=sum(each.atol for each in numerics),
            why="; ".join(each.why for each in numerics if each.why and not each.bitwise),
            other_draws="; ".join(each.other_draws for each in numerics if each.other_draws),
        )

    def holds(self, base: float, treated: float, beyond: float = 0.0) -> bool:
        """Whether the two are within it, or `beyond` it by so much. NaN is met by NaN alone."""
        if math.isnan(base) or math.isnan(treated):
            return math.isnan(base) and math.isnan(treated)
        return _distance(base, treated) <= self.atol + self.rtol * abs(base) + beyond


def judge_parity(bases: Sequence[Sequence[float]], treated: Sequence[float], allowed: Allowed) -> Parity:
    """Hold the losses of a treated run against those of untreated ones, two at least.

    A claim of bitwise equality (`rtol` and `atol` 0) is held to it where the loop repeats itself bit for bit; where
    it does not, twice its own difference is allowed on top of the tolerance.
    """
    base = bases[0]
    if not base or not treated:
        return Parity(kept=None, text="no loss was seen (nothing called .backward() on a single value)")
    for other, which in [*((each, "again without") for each in bases[1:]), (treated, "with")]:
        if len(base) != len(other):
            return Parity(kept=None, text=f"{len(base)} losses without, {len(other)} {which} the treatment")
    steps = list(zip(*bases, strict=True))
    if all(map(math.isnan, base)):
        return Parity(kept=None, text="every loss is NaN, with and without", num_losses=len(base))
    repeat = max(_distance(a, b) for step in steps for a, b in combinations(step, 2))
    if repeat > allowed.atol + max(allowed.rtol, _REPEATS) * _largest(base):
        text = f"the loop differs from itself by {repeat:.3g} from the same state: its batches are others each time"
        return Parity(kept=None, text=text, repeat=repeat, num_losses=len(base))
    pairs = list(zip(base, treated, strict=True))
    difference = max(_distance(a, b) for a, b in pairs)
    kept = all(allowed.holds(a, b, beyond=2 * repeat) for a, b in pairs)
    alone = all(allowed.holds(a, b) for a, b in pairs)
    found = Parity(kept=kept, text="", difference=difference, repeat=repeat, num_losses=len(pairs))
    if not kept and allowed.other_draws:
        text = f"losses differ by {difference:.3g}: {allowed.other_draws}"
        return replace(found, kept=None, text=text, excuse=allowed.other_draws)
    return replace(found, text=_parity_text(found, allowed, alone=alone))


def is_doubtful(parity: Parity, base: Sequence[float]) -> bool:
    """Whether more runs of the untreated loop may show that it differs from itself as much as the treated one does."""
    if parity.kept is not False or parity.difference is None:
        return False
    return parity.difference <= 2 * _REPEATS * _largest(base)


def is_open(runs: Sequence[Parity], base: Sequence[float]) -> bool:
    """Whether another treated run may tell that what these differ by comes by chance."""
    return pooled(runs, base).kept is None and all(each.kept or is_doubtful(each, base) for each in runs)


def pooled(runs: Sequence[Parity], base: Sequence[float]) -> Parity:
    """Of treated runs, each held against the same untreated ones. `kept` is None as long as it may be chance."""
    off = [each for each in runs if each.kept is False]
    if not off:
        return runs[0]
    worst = max(off, key=lambda each: each.difference or 0.0)
    if len(off) >= _ACCUSED or not all(is_doubtful(each, base) for each in off):
        return replace(worst, text=f"{worst.text}; in {len(off)} of {len(runs)} runs" if len(runs) > 1 else worst.text)
    shown = f"in {len(off)} of {format_plural(len(runs), 'run')} with the treatment"
    by = f"largest difference {worst.difference:.3g}, {shown}"
    if sum(each.kept is True for each in runs) > _MOST_TREATED - _ACCUSED:
        return replace(worst, kept=True, text=f"losses differ by chance: {by}")
    return replace(worst, kept=None, text=f"losses differ, perhaps by chance: {by}; more runs would tell (--seconds)")


def _largest(losses: Sequence[float]) -> float:
    return max((abs(loss) for loss in losses if not math.isnan(loss)), default=0.0)


def _distance(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    distance = abs(a - b)
    return math.inf if math.isnan(distance) else distance


def _parity_text(parity: Parity, allowed: Allowed, *, alone: bool) -> str:
    """`alone`: within what is allowed, without what the loop differs from itself by."""
    if parity.difference == 0:
        return "losses equal bit for bit"
    own = f"; the loop differs from itself by {parity.repeat:.3g}" if parity.repeat else ""
    if parity.kept and not alone:
        return f"losses differ as those of the loop itself do: largest difference {parity.difference:.3g}{own}"
    if allowed.rtol == allowed.atol == 0:
        return f"losses not equal bit for bit: largest difference {parity.difference:.3g}{own}"
    limits = f"rtol {allowed.rtol:g}" + (f", atol {allowed.atol:g}" if allowed.atol else "")
    because = f" ({allowed.why})" if allowed.why else ""
    held = "within" if parity.kept else "off"
    return f"losses {held} {limits}{because}: largest difference {parity.difference:.3g}{own}"
