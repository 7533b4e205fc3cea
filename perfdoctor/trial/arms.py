"""The arms of a trial: each suspect alone, all together, and the first few fixes together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfdoctor.diagnose.finding import Finding, Saving
from perfdoctor.trial.estimate import LEAST_CLAIM, Estimate, claimed, estimate, estimate_mean
from perfdoctor.trial.neutraliser import Mode, Neutraliser
from perfdoctor.trial.outcome import ALL, JOINT, ArmResult, TrialOutcome
from perfdoctor.trial.suspects import Suspect
from perfdoctor.units import format_plural

MOST_BOUNDS = 2  # arms that are no prediction
MOST_JOINTS = 3
_RARE = 0.2  # of what comes less often a step, the mean is estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What is on in a block: neutralisers with their mode. `finding` is None where all are on together."""

    finding: Finding | None
    mode: Mode
    switches: tuple[tuple[Neutraliser, str], ...]

    @property
    def edge(self) -> int:
        return max(neutraliser.edge for neutraliser, _ in self.switches)

    @property
    def base_edge(self) -> int:
        return max(neutraliser.base_edge for neutraliser, _ in self.switches)


def single_arms(suspects: Sequence[Suspect]) -> list[Arm]:
    """One arm for each suspect, a few for bounds, and one with all on."""
    first: list[Arm] = []
    bounds: list[Arm] = []
    for suspect in suspects:
        neutraliser = suspect.neutraliser
        assert neutraliser is not None
        for each in neutraliser.modes:
            mode = replace(each, rare=each.rare or 0 < suspect.finding.count < _RARE)
            arm = Arm(finding=suspect.finding, mode=mode, switches=((neutraliser, mode.name),))
            (first if mode.prediction else bounds).append(arm)
    if len(first) > 1:
        mode = Mode(name=ALL, text="all together", rare=any(arm.mode.rare for arm in first))
        first.append(Arm(finding=None, mode=mode, switches=tuple(pair for arm in first for pair in arm.switches)))
    return [*first, *bounds[:MOST_BOUNDS]]


def joint_arms(arms: Sequence[Arm], so_far: Sequence[Estimate | None], base_ns: float) -> list[Arm]:
    """The best two fixes together, the best three, ...: what each gives once those before it are made.

    Of those that give something for sure; all of them together is an arm already where nothing else was tried.
    """
    rows = [(arm, claimed(each, base_ns)) for arm, each in zip(arms, so_far, strict=True) if each is not None]
    good = [row for row in rows if row[0].finding is not None and row[0].mode.prediction and row[1].low_ns > 0]
    chain = [arm for arm, _ in sorted(good, key=lambda row: -row[1].mid_ns)]
    singles = sum(arm.finding is not None and arm.mode.prediction for arm in arms)
    longest = len(chain) if len(chain) < singles else len(chain) - 1
    return [_joint(chain[:size]) for size in range(2, min(longest, MOST_JOINTS + 1) + 1)]


def _joint(chain: Sequence[Arm]) -> Arm:
    mode = Mode(
        name=f"{JOINT} {len(chain)}",
        text=f"the first {len(chain)} fixes together",
        rare=any(arm.mode.rare for arm in chain),
    )
    return Arm(finding=None, mode=mode, switches=tuple(pair for arm in chain for pair in arm.switches))


def fix_order(outcome: TrialOutcome) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Findings in the order in which to fix them, and what is to be said about that order.

    The one that gives most back comes first, then by what each gives alone; where the first few were tried together,
    one that gives nothing more once those before it are made is left out.
    """
    rows = [arm for arm in outcome.arms if arm.finding is not None and arm.prediction and arm.saving.low_ns > 0]
    rows.sort(key=lambda arm: -arm.saving.median_ns)
    totals = {int(arm.mode.split()[-1]): arm for arm in outcome.arms if arm.mode.startswith(JOINT)}
    if together := outcome.together:
        totals.setdefault(sum(arm.finding is not None and arm.prediction for arm in outcome.arms), together)
    kept, notes = _worth_it(rows, totals, outcome.base_ns)
    joint = any(size in totals for size in range(2, len(rows) + 1))
    if len(rows) > 1 and not joint:
        notes.append("the order is that of what each gives back alone: the first few were not tried together")
    return tuple(kept), tuple(notes)


def _worth_it(rows: Sequence[ArmResult], totals: dict[int, ArmResult], base_ns: int) -> tuple[list[Finding], list[str]]:
    kept: list[Finding] = []
    notes: list[str] = []
    before: Saving | None = None  # of those kept so far, together
    for size, arm in enumerate(rows, 1):
        assert arm.finding is not None
        total = arm if size == 1 else totals.get(size)
        more = total is None or before is None or total.saving.high_ns > before.median_ns + LEAST_CLAIM * base_ns
        if more:
            kept.append(arm.finding)
        else:
            notes.append(f"{_place_of(arm.finding)} gives nothing more once the fixes before it are made")
        before = total.saving if total is not None else None
    return kept, notes


def _place_of(finding: Finding) -> str:
    return finding.code if finding.site is None else f"{finding.site.frame.file}:{finding.site.frame.line}"


def measured_arm(arm: Arm, differences: Any) -> Estimate | None:
    if not len(differences):
        return None
    return estimate_mean(differences) if arm.mode.rare else estimate(differences)


def saving_of(measured: Estimate, text: str, counted: int) -> Saving:
    """The same for a report; `counted`: steps of a block."""
    pairs = f"{format_plural(measured.num_pairs, 'pair')} of blocks of {format_plural(counted, 'step')}"
    return Saving(
        median_ns=round(measured.mid_ns),
        low_ns=round(measured.low_ns),
        high_ns=round(measured.high_ns),
        basis=f"trial, {text}: {pairs}",
    )


def name_of(arm: Arm) -> str:
    if arm.finding is None:
        return "all suspects together"
    site = arm.finding.site
    where = f"{site.frame.file}:{site.frame.line} " if site is not None else ""
    return f"{where}{arm.finding.code} ({arm.mode.text})"  # the mode's name is for the JSON
