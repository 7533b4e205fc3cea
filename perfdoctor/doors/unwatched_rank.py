"""A rank that does not record, beside ranks that do: the same script, ended at the same step, nothing hooked else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from perfdoctor.doors.script import ScriptOptions, ScriptRun, as_main, execute_program, load_program
from perfdoctor.doors.script_stop import ScriptStop
from perfdoctor.record.capture import Capture, Note
from perfdoctor.watch.batches import detected
from perfdoctor.watch.plan import Plan
from perfdoctor.watch.recorder import Recorder
from perfdoctor.watch.steps import StepDetector, now
from perfdoctor.watch.surroundings import read_environment


def run_unwatched(target: str, arguments: Sequence[str] = (), options: ScriptOptions | None = None) -> ScriptRun:
    """Run `target` as `run_script` does, without watching it.

    It is ended after as many steps as a watched rank takes: one that went on alone would wait in a collective for ever.

    Raises:
        UsageError: there is no such script or module, or it does not compile.
    """
    options = options or ScriptOptions()
    program = load_program(target, module=options.module)
    recorder = Recorder(Plan(warmup=options.warmup, active=options.active), options.hits, options.profiled)
    stop = ScriptStop(throw_away=False)
    num_steps = 0

    def ended(_: int) -> None:
        nonlocal num_steps
        num_steps += 1
        # The phases are known once the loop runs: only then it has chosen its device.
        if not options.keep_going and num_steps >= recorder.plan.total(recorder.stages):
            stop()

    def restarted() -> None:
        nonlocal num_steps
        num_steps = 0

    detector = StepDetector(now, ended, restarted)
    with as_main(program, arguments), detected(detector):
        exit_code, stopped = stop.run(partial(execute_program, program))
    note = Note(code="not-recorded", text="this rank was not among those that record")
    capture = Capture(source="session", environment=read_environment(None, [], 0), notes=(note,))
    return ScriptRun(capture=capture, exit_code=exit_code, stopped=stopped, num_steps=num_steps)
