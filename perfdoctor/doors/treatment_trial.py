"""`perfdoctor trial --treat`: treatments on trial in an unmodified script, in a throw-away run.

A script that dies while a treatment is on (out of memory, say) is that treatment's Verdict; it is run again for the
treatments that are left.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from perfdoctor.doors.script import ScriptStopped, as_main, execute_program, load_program
from perfdoctor.errors import SessionError
from perfdoctor.treat.switches import TREATMENTS, treatment
from perfdoctor.treat.treatment import Treatment
from perfdoctor.trial.live_loop import LiveLoop
from perfdoctor.trial.sandbox import Sandbox
from perfdoctor.trial.treatments_trial import TreatmentLimits, TreatmentsTrial
from perfdoctor.trial.verdict import Verdict
from perfdoctor.watch.clocks import stamp_now
from perfdoctor.watch.steps import StepDetector

_MOST_RUNS = 4


def try_treatments(
    target: str,
    arguments: Sequence[str] = (),
    *,
    names: Sequence[str] = (),
    module: bool = False,
    limits: TreatmentLimits | None = None,
) -> tuple[Verdict, ...]:
    """Run `target` as `python` would and try the treatments named (all that there are, where none is).

    Raises:
        UsageError: no such script or treatment.
        SessionError: the script ended, or failed, before the first treatment was tried.
    """
    left = [treatment(name) for name in names] or list(TREATMENTS)
    verdicts: list[Verdict] = []
    for _ in range(_MOST_RUNS):
        trial = _run_once(target, arguments, left, module, limits)
        verdicts += trial.verdicts
        tried = {verdict.treatment for verdict in verdicts}
        left = [each for each in left if each.name not in tried]
        if not left or not trial.verdicts:
            break
    if not verdicts:
        raise SessionError(f"{target} ended before a treatment was tried: it needs some hundred steps")
    return tuple(verdicts)


def _run_once(
    target: str, arguments: Sequence[str], treatments: Sequence[Treatment], module: bool, limits: TreatmentLimits | None
) -> TreatmentsTrial:
    program = load_program(target, module=module)
    live = LiveLoop()
    trial = TreatmentsTrial(treatments, live, limits=limits, ended=_stop)
    steps = StepDetector(stamp_now, trial.step_ended)
    with Sandbox(), as_main(program, arguments), _caught() as errors:
        live.install()
        steps.install()
        try:
            exit_code, _ = execute_program(program)
            if errors or exit_code:
                trial.fail(errors[0] if errors else RuntimeError(f"the script ended with exit code {exit_code}"))
        finally:
            trial.close()
            steps.remove()
            live.remove()
    return trial


def _stop() -> None:
    raise ScriptStopped


@contextmanager
def _caught() -> Iterator[list[BaseException]]:
    """What the script died of; it is printed as ever."""
    errors: list[BaseException] = []
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        errors.append(error)
        before(kind, error, trace)

    sys.excepthook = hook
    try:
        yield errors
    finally:
        if sys.excepthook is hook:
            sys.excepthook = before
