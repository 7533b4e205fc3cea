"""What came of a trial, as values. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from perfdoctor.diagnose.finding import Diagnosis, Finding, Saving

ALL, JOINT = "all", "first"  # modes: all suspects at once; 'first 2', 'first 3': the best fixes together


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """One way to neutralise one suspect (or all: `finding` is None), measured."""

    finding: Finding | None
    mode: str  # 'gone', 'every', 'pinned', ...; 'all', 'first 2', ...
    text: str  # what was done
    prediction: bool  # stands for what the fix gives; else a bound
    saving: Saving
    num_pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A suspect that was not tried, and why."""

    finding: Finding
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """A diagnosis whose findings carry what their removal gave back, and all that was measured to know it."""

    diagnosis: Diagnosis
    arms: tuple[ArmResult, ...] = ()
    refused: tuple[Refusal, ...] = ()
    order: tuple[Finding, ...] = ()  # fix them in this order; those that give nothing back are left out
    base_ns: int = 0  # a step with nothing neutralised, median of the blocks
    base_low_ns: int = 0
    base_high_ns: int = 0
    num_steps: int = 0
    counted: int = 0  # steps of a block
    rounds: int = 0
    left_out: int = 0  # findings beyond the cap
    complete: bool = True  # False: the loop ended first
    notes: tuple[str, ...] = field(default=())
    failure: str = ""  # what the script died of before the end: 'IndexError: ...'

    def result_of(self, finding: Finding) -> ArmResult | None:
        """The arm that stands for what fixing `finding` gives back."""
        same = [arm for arm in self.arms if arm.finding is not None and key_of(arm.finding) == key_of(finding)]
        return next((arm for arm in same if arm.prediction), None)

    @property
    def together(self) -> ArmResult | None:
        """All suspects at once."""
        return next((arm for arm in self.arms if arm.mode == ALL), None)


def with_savings(outcome: TrialOutcome) -> Diagnosis:
    """Its diagnosis, each finding with what the trial measured of it."""

    def measured(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        rows = ((finding, outcome.result_of(finding)) for finding in findings)
        return tuple(replace(f, measured_saving=row.saving) if row is not None else f for f, row in rows)

    diagnosis = outcome.diagnosis
    return replace(diagnosis, findings=measured(diagnosis.findings), leave_alone=measured(diagnosis.leave_alone))


def key_of(finding: Finding) -> tuple[object, ...]:
    """What tells a finding from the others of a diagnosis."""
    return (finding.code, finding.kind, finding.site, finding.title)
