"""A suspect that the loop cannot do without: the script died while it was off. The others are judged all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfdoctor.diagnose.finding import Finding
from perfdoctor.trial.arms import Arm, name_of
from perfdoctor.trial.estimate import FEWEST_PAIRS
from perfdoctor.trial.outcome import ArmResult, Refusal, TrialOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenArm:
    """What was on when the script died. `finding` is None where several were off: none is known to be the cause."""

    finding: Finding | None
    mode: str
    text: str  # what was done: 'answered with the value of the step before'
    prediction: bool
    name: str  # both: 'train.py:12 host-sync (answered with the value of the step before)'
    failure: str  # 'IndexError: ...'
    num_others: int  # predictions that have nothing to do with it

    @property
    def why(self) -> str:
        """Why there is no result."""
        return f"given up, the script failed with this on ({self.text}): {self.failure}"

    def forbids(self, finding: Finding) -> bool:
        """Whether `finding`, of another run of the script, is not to be tried at all. Counts in a title may differ."""
        mine = self.finding
        same = mine is not None and (mine.code, mine.kind, mine.site) == (finding.code, finding.kind, finding.site)
        return same and self.prediction

    def excludes(self, arm: Arm) -> bool:
        """Whether an arm of another run is not to be tried."""
        if arm.finding is None or self.finding is None:
            return arm.finding is self.finding
        mine = replace(self, prediction=True)
        return mine.forbids(arm.finding) and (self.prediction or arm.mode.name == self.mode)


def broken_by(arm: Arm, failure: str, arms: Sequence[Arm]) -> BrokenArm:
    """What the script died of with `arm` on, one of `arms`."""
    others = [each for each in arms if each.finding is not None and each.mode.prediction and each is not arm]
    return BrokenArm(
        finding=arm.finding,
        mode=arm.mode.name,
        text=arm.mode.text,
        prediction=arm.mode.prediction,
        name=name_of(arm),
        failure=failure,
        num_others=len(others),
    )


def judged_without(broken: BrokenArm, outcome: TrialOutcome) -> TrialOutcome:
    """The outcome with nothing claimed for what broke the script, nor for several at once that hold it."""

    def stays(arm: ArmResult) -> bool:
        if arm.finding is None:
            return broken.finding is not None and not broken.prediction
        return (arm.finding, arm.mode) != (broken.finding, broken.mode)

    return said_of(broken, replace(outcome, arms=tuple(filter(stays, outcome.arms))))


def said_of(broken: BrokenArm, outcome: TrialOutcome) -> TrialOutcome:
    """The outcome with the reason why there is no result for what broke the script."""
    if broken.finding is None:
        return replace(outcome, notes=(*outcome.notes, f"{broken.name}: {broken.why}"))
    refused = Refusal(finding=broken.finding, why=broken.why)
    return replace(outcome, refused=(*outcome.refused, refused))


def others_undecided(broken: BrokenArm, arms: Sequence[ArmResult]) -> bool:
    """Whether something besides what broke the script has too few blocks for a claim: another run may decide it."""
    enough = [arm for arm in arms if arm.finding is not None and arm.prediction and arm.num_pairs >= FEWEST_PAIRS]
    return len(enough) < broken.num_others
