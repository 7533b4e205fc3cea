"""A script with treatments on trial in it, in this process: run until the trial is over, everything taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perfdoctor.treat.treatment import Treatment
from perfdoctor.trial.live_loop import LiveLoop
from perfdoctor.trial.treatment_time import TreatmentLimits
from perfdoctor.trial.treatments_trial import TreatmentsTrial
from perfdoctor.watch.clocks import stamp_now
from perfdoctor.watch.steps import StepDetector


class Over(BaseException):
    """Ends the script."""


def end() -> None:
    raise Over


def run_trial(
    treatments: Sequence[Treatment], train: Callable[[], None], limits: TreatmentLimits, *, failures_told: bool
) -> TreatmentsTrial:
    """`failures_told`: what `train` raises is a failure of the treatment that is on; else it comes out."""
    live = LiveLoop()
    trial = TreatmentsTrial(treatments, live, limits=limits, ended=end)
    steps = StepDetector(stamp_now, trial.step_ended)
    live.install()
    steps.install()
    try:
        train()
    except Over:
        pass
    except Exception as error:
        if not failures_told:
            raise
        trial.fail(error)
    finally:
        trial.close()
        steps.remove()
        live.remove()
    return trial
