"""What `NonFiniteWatch` found, in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfdoctor.kernels.metrics_reference import RECORD
from perfdoctor.units import format_plural

NAMES = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteHit:
    """The first check of one step that saw a value which is infinite or NaN."""

    step: int
    """from 1: how often `step()` had been called, this one included"""
    parameter: str | None
    """the first parameter, in the model's order, with such a gradient; None where it was the loss"""
    num_values: int
    """in that gradient"""
    num_parameters: int
    """with such a gradient in that check"""
    num_steps_later: int
    """steps that were trained before the host learnt of it"""
    skipped: bool
    """the update was left out on the device"""

    def __str__(self) -> str:
        what = "the loss is not finite"
        if self.parameter is not None:
            values = f"{format_plural(self.num_values, 'value')} {'is' if self.num_values == 1 else 'are'}"
            what = f"the gradient of {self.parameter}: {values} not finite"
        if self.num_parameters > (self.parameter is not None):
            what += f" ({format_plural(self.num_parameters, 'parameter')} in all)"
        return f"step {self.step}: {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNote:
    """What the host must remember of a step until its record arrives."""

    step: int
    checks: tuple[NAMES, ...]
    """the names behind the gradients of each check"""
    skips: bool


def hit_of(note: StepNote, record: Sequence[int], step_now: int) -> NonFiniteHit | None:
    """The hit in a step's record (see `metrics_reference.RECORD`), if there is one."""
    assert len(record) == RECORD
    num_bad, check, index, num_values, num_parameters = record[:5]
    if not num_bad:
        return None
    return NonFiniteHit(
        step=note.step,
        parameter=None if index < 0 else note.checks[check][index],
        num_values=num_values,
        num_parameters=num_parameters,
        num_steps_later=max(0, step_now - note.step),  # a step that finish() found open has not been counted yet
        skipped=note.skips,
    )


def advice(hit: NonFiniteHit) -> str:
    """The next move after a hit that is to stop the training."""
    if hit.skipped:
        return ""
    cause = "; torch.autograd.set_detect_anomaly(True) on that step's batch finds the operation"
    later = f". Training went {hit.num_steps_later} step{'s' * (hit.num_steps_later != 1)} on with it meanwhile"
    return f"{later}: go back to a checkpoint from before step {hit.step}{cause}"
