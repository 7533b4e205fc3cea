"""`perfdoctor trial [options] script.py args...`: a throw-away run that measures what each suspect really costs.

The script is watched, then its loop goes on with one suspect after the other switched off and on in blocks of steps.
What it writes goes to a scratch folder and is deleted. It must run long enough: some 50 steps are watched, a few
hundred to two thousand tried, then it is stopped. It advances whatever outside stream it reads from.

With `--treat` (or `--treat=a,b`) it is treatments that are tried: real changes, losses compared first, lines to keep.
Those that a running process cannot take back are tried in short processes, as it is and treated in turn.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from perfdoctor.cli.output import Outcome, Parser, check_output, count
from perfdoctor.cli.run import Command, is_alone, misplaced, split_command
from perfdoctor.doors.script import output_aside
from perfdoctor.errors import INTERRUPTED, SessionError, UsageError

_EMULATED = "on an emulated CUDA device: numbers and losses are real, times are those of the CPU and no GPU's"

_MOST_STEPS, _SUSPECTS = 100_000, 6
_MOST_SECONDS = 3600
_SECONDS = 120.0
_OF_THE_TIME = 0.75  # that treatments get one by one; the rest is for the best together
_ALL_TREATMENTS_SECONDS = (
    240.0  # of a dozen that fit, each takes six rounds at least; with the watching under 5 minutes
)
_NUMBER = re.compile(r"\d+\.?\d*|\.\d+")

_PLAIN = "perfdoctor: no GPU here: the loop is tried as it runs on the CPU (or give it --device emulated)"


def execute(argv: Sequence[str]) -> Outcome:
    """Try the script. Its own exit code wins where it is not 0.

    Raises:
        UsageError: wrong options, no such script, no torch, or a trial would be wrong here.
        OSError: the report cannot be written.
    """
    command = split_command(argv)
    options = _parser().parse_args(command.own)
    if options.seconds is None:
        options.seconds = _ALL_TREATMENTS_SECONDS if options.treat == () else _SECONDS
    if not command.target:
        raise UsageError(
            "no script: perfdoctor trial [options] script.py args..., or -m module (--help lists the options)"
        )
    check_output(options.output)
    hint = misplaced(command, "trial", _parser())
    alone = is_alone(options)
    with output_aside() if alone else nullcontext():
        try:
            outcome = _measure(command, options) if options.treat is None else _treat(command, options)
        except SessionError as error:
            from perfdoctor.doors.script_trial import ScriptFailed

            if hint and isinstance(error, ScriptFailed):  # over them, perhaps
                raise ScriptFailed(f"{error}. {hint}") from error
            raise
    if hint and outcome.exit_code:
        outcome = replace(outcome, messages=(*outcome.messages, hint))
    return replace(outcome, alone=alone)


def _measure(command: Command, options: argparse.Namespace) -> Outcome:
    run = _try(command, options)
    from perfdoctor.report.trial import TrialReport

    report = TrialReport.of(run.outcome, script=command.typed, emulated=_emulated_command(command, options))
    on = f", with {run.broken.name} on trial" if run.broken is not None else ""
    messages = (_ended(run.exit_code, on),) if run.exit_code else ()
    text = report.to_json() if options.format == "json" else report.to_text()
    return Outcome(text=text, path=options.output, exit_code=run.exit_code, messages=messages)


def _try(command: Command, options: argparse.Namespace) -> Any:
    with _device(options) as device:
        from perfdoctor.doors.script_trial import TrialOptions, run_trial
        from perfdoctor.report.progress import ProgressLine
        from perfdoctor.trial.runner import Limits

        return run_trial(
            command.target,
            command.arguments,
            TrialOptions(
                module=command.module,
                warmup=options.warmup,
                active=options.active,
                limits=Limits(steps=options.steps, seconds=options.seconds),
                suspects=options.suspects,
                hits=None if device is None else device.log,
                progress=ProgressLine(),
            ),
        )


def _treat(command: Command, options: argparse.Namespace) -> Outcome:
    with _device(options) as device:
        from perfdoctor.doors.treatment_trial import TreatmentOptions, try_treatments
        from perfdoctor.report.progress import ProgressLine
        from perfdoctor.treat.switches import TREATMENTS
        from perfdoctor.trial.treatment_time import TreatmentLimits

        if not options.treat and set(_names(command.target)) <= {each.name for each in TREATMENTS}:
            raise UsageError(f"--treat takes its names behind '=': --treat={command.target} SCRIPT.py args...")
        run = try_treatments(
            command.target,
            command.arguments,
            TreatmentOptions(
                names=options.treat,
                module=command.module,
                warmup=options.warmup,
                active=options.active,
                limits=TreatmentLimits(seconds=options.seconds),
                hits=None if device is None else device.log,
                progress=ProgressLine(),
            ),
        )
    from perfdoctor.report.verdicts import render_verdicts, render_verdicts_json

    notes = (*run.notes, _EMULATED) if device is not None else run.notes

    def again(names: Sequence[str]) -> str:
        needed = sum(verdict.needed_s for verdict in run.verdicts)
        enough = max(2 * options.seconds, 10 * math.ceil((60 + needed / _OF_THE_TIME) / 10) if needed else 0)
        return _command_line(command, options, names, min(enough, _MOST_SECONDS))

    if options.format == "json":
        text = render_verdicts_json(run.verdicts, run.diagnosis, notes=notes, again=again)
    else:
        text = render_verdicts(run.verdicts, run.diagnosis, notes=notes, root=os.getcwd(), again=again)
    messages = (_ended(run.exit_code),) if run.exit_code else ()
    return Outcome(text=text, path=options.output, exit_code=run.exit_code, messages=messages)


def _ended(exit_code: int, on: str = "") -> str:
    """In words; `on` says what was on trial then."""
    return "interrupted" if exit_code == INTERRUPTED else f"the script ended with exit code {exit_code}{on}"


def _command_line(command: Command, options: argparse.Namespace, names: Sequence[str], seconds: float) -> str:
    """The command that tries these treatments on the same script, as it is typed."""
    words = ["perfdoctor", "trial", f"--treat={','.join(names)}", "--seconds", f"{seconds:g}"]
    words += ["--device", "emulated"] if options.device == "emulated" else []
    return f"{shlex.join([*words, *_unusual(options, warmup=5, active=10)])} {command.typed}"


def _emulated_command(command: Command, options: argparse.Namespace) -> str:
    """The command that tries the script on an emulated device; '' where it saw a device."""
    import torch

    if options.device == "emulated" or torch.cuda.is_available():
        return ""
    words = ["perfdoctor", "trial", "--device", "emulated"]
    usual = _unusual(options, warmup=5, active=10, steps=_MOST_STEPS, seconds=_SECONDS, suspects=_SUSPECTS)
    return f"{shlex.join([*words, *usual])} {command.typed}"


def _unusual(options: argparse.Namespace, **usual: float) -> list[str]:
    """The options that are not as usual, as they are typed."""
    given = [(name, getattr(options, name)) for name, value in usual.items() if getattr(options, name) != value]
    return [word for name, value in given for word in (f"--{name}", f"{value:g}")]


@contextmanager
def _device(options: argparse.Namespace) -> Iterator[Any]:
    """The emulated device where it was asked for, None where the script sees what is there."""
    try:
        import torch
    except ImportError as error:
        raise UsageError(f"torch cannot be imported by {sys.executable} ({error}): install it there") from error
    if options.device != "emulated":
        if not torch.cuda.is_available():
            print(_PLAIN, file=sys.stderr, flush=True)
        yield None
        return
    if torch.cuda.is_available():
        raise UsageError("--device emulated: there is a GPU here, whose times are the ones that count")
    from perfdoctor.emulate import emulate_cuda

    with emulate_cuda() as device:
        yield device


def _parser() -> Parser:
    parser = Parser(
        prog="perfdoctor trial",
        usage="perfdoctor trial [options] script.py args...\n       perfdoctor trial [options] -m module args...",
        allow_abbrev=False,
        description="Measure what each suspect of a training loop really costs, in a throw-away run.",
    )
    parser.add_argument("--warmup", type=count, default=5, metavar="N", help="steps before anything is measured (5)")
    parser.add_argument("--active", type=count, default=10, metavar="N", help="steps in each watched phase (10)")
    parser.add_argument("--steps", type=count, default=_MOST_STEPS, metavar="N", help="at most so many steps on trial")
    parser.add_argument(
        "--seconds", type=_seconds, metavar="S", help="at most so long on trial (120; with --treat without names 240)"
    )
    parser.add_argument(
        "--suspects", type=count, default=_SUSPECTS, metavar="N", help="at most so many findings tried (6)"
    )
    parser.add_argument(
        "--treat", type=_names, nargs="?", const=(), metavar="=a,b",
        help="try treatments instead: those that cure what was found first, then the others that fit; or those named",
    )  # fmt: skip
    parser.add_argument(
        "--device",
        choices=("real", "emulated"),
        default="real",
        help="emulated: a CUDA device in name only, whose times are those of the CPU (real)",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of the report (text)")
    parser.add_argument("-o", "--output", metavar="FILE", default="", help="write the report there")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _seconds(text: str) -> float:
    value = float(text) if _NUMBER.fullmatch(text.strip()) else 0.0
    if not 1 <= value <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text}: a number of seconds between 1 and {_MOST_SECONDS} is needed")
    return value
