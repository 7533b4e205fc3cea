"""`perfdoctor run [options] script.py args...`: an unmodified script, watched.

Everything after the script (or after `-m module`) belongs to the script. Its own output is left alone; the report comes
after it. Where there is no GPU the script sees an emulated one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfdoctor.cli.output import Outcome, Parser, add_output_options, check_output, count, deliver
from perfdoctor.cli.progress import progress
from perfdoctor.cli.termination import ended_with_a_report
from perfdoctor.doors.script import output_aside
from perfdoctor.errors import UsageError
from perfdoctor.record.capture import Capture
from perfdoctor.record.script_note import script_note
from perfdoctor.units import format_plural

if TYPE_CHECKING:
    from perfdoctor.doors.rank_gathering import RankGroup
    from perfdoctor.doors.script import ScriptRun

# Own options that take no value. All others take one: the word after them is not the script.
_FLAGS = frozenset({"--keep-going", "--treat", "-h", "--help"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The words of a command line, split: perfdoctor's own options, the target, and what belongs to the script."""

    own: tuple[str, ...]
    target: str
    module: bool
    arguments: tuple[str, ...]

    @property
    def typed(self) -> str:
        """The target and its arguments as they are typed behind perfdoctor's options, quoted for a shell."""
        return shlex.join((*["-m"] * self.module, self.target, *self.arguments))


def execute(argv: Sequence[str]) -> Outcome:
    """Run the script, then diagnose what was recorded. The script's own exit code wins where it is not 0.

    Raises:
        UsageError: wrong options, no such script, or no torch.
        OSError: the recording or the report cannot be written.
    """
    command = split_command(argv)
    options = _parser().parse_args(command.own)
    if not command.target:
        raise UsageError(
            "no script: perfdoctor run [options] script.py args..., or -m module (--help lists the options)"
        )
    check_output(options.output)
    check_output(options.save, "--save")
    hint = misplaced(command, "run", _parser())
    ranks = _join(options)
    alone = is_alone(options)
    with ended_with_a_report(lasting=ranks is not None), output_aside() if alone else nullcontext():
        outcome = _watched(command, options, ranks)
    if hint and outcome.exit_code:
        outcome = replace(outcome, messages=(*outcome.messages, hint))
    return replace(outcome, alone=alone)


def is_alone(options: argparse.Namespace) -> bool:
    """Whether the report is for a program that reads standard output: what the script prints goes elsewhere then."""
    return options.format != "text" and not options.output


def misplaced(command: Command, verb: str, parser: argparse.ArgumentParser) -> str:
    """Says on standard error that options behind the script are the script's, where perfdoctor has some of that name,
    and returns how to give them to perfdoctor: for a script that fails over them. '' where there are none."""
    own = {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}
    found = [word for word in command.arguments if word.partition("=")[0] in own]
    if not found:
        return ""
    target = f"-m {command.target}" if command.module else command.target
    names = ", ".join(dict.fromkeys(word.partition("=")[0] for word in found))
    ours, others = _parted(command.arguments, found)
    left = replace(command, arguments=tuple(others))
    print(f"perfdoctor: {names} behind {target}: the script's, not perfdoctor's", file=sys.stderr, flush=True)
    return (
        f"{names} behind {target} went to the script. What is meant for perfdoctor stands in front of it: "
        f"perfdoctor {verb} {shlex.join((*command.own, *ours))} {left.typed}"
    )


def _parted(words: Sequence[str], found: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options, each once with the value that follows it, and the other words in their order."""
    ours: list[str] = []
    left: list[str] = []
    rest = list(words)
    while rest:
        if rest[0] not in found or rest[0] in ours:
            left.append(rest.pop(0))
            continue
        alone = rest[0] in _FLAGS or "=" in rest[0]
        ours += rest[: 1 if alone else 2]
        del rest[: 1 if alone else 2]
    return ours, left


def _watched(command: Command, options: argparse.Namespace, ranks: RankGroup | None) -> Outcome:
    """Run the script, save, gather, report."""
    run = _watch(command, options, ranks)
    capture, exit_code = run.capture, run.exit_code
    rank = capture.environment.rank or (ranks.rank if ranks is not None else 0)
    options.output, options.save = for_rank(options.output, rank), for_rank(options.save, rank)
    messages = [_stopped(command, run)] if run.stopped and rank == 0 else []
    if options.save and (ranks is None or ranks.selected):
        note = script_note(command.target, module=command.module, arguments=bool(command.arguments))
        replace(capture, notes=(*capture.notes, note)).save(options.save)
        messages.append(f"saved the recording in {options.save}")
    if exit_code != 0:
        messages.append(f"the script ended with exit code {exit_code}")
    if ranks is not None and rank != 0:  # one rank speaks, all write their recordings
        ranks.publish(capture)
        messages += [ranks.problem] if ranks.problem else []
        return Outcome(text="", exit_code=exit_code, messages=tuple(messages))
    outcome = _diagnosed(capture, command, options, ranks)
    text = outcome.text if outcome.path or rank == 0 else ""
    return replace(
        outcome, text=text, exit_code=exit_code or outcome.exit_code, messages=(*messages, *outcome.messages)
    )


def _stopped(command: Command, run: ScriptRun) -> str:
    """That the script did not end by itself: its last lines, and what it would have written, are not there."""
    steps = f" after {format_plural(run.num_steps, 'step')}" if run.num_steps else ""
    return f"stopped {command.target}{steps}, which is all that is watched (--keep-going lets it run to its end)"


def for_rank(path: str, rank: int) -> str:
    """The file of a rank: `report.json` of rank 0, `report.rank1.json` of rank 1."""
    return path if rank == 0 or not path else str(Path(path).with_suffix(f".rank{rank}{Path(path).suffix}"))


def split_command(argv: Sequence[str]) -> Command:
    """Where perfdoctor's own options end: at the first word that is no option, at `-m`, or after `--`."""
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-m", "--"):
        takes_value = argv[at] not in _FLAGS and "=" not in argv[at]
        at += 2 if takes_value else 1
    own, rest = tuple(argv[:at]), tuple(argv[at:])
    if rest[:1] == ("--",):
        rest = rest[1:]
    module = rest[:1] == ("-m",)
    rest = rest[1:] if module else rest
    return Command(own=own, target=rest[0] if rest else "", module=module, arguments=rest[1:])


def _parser() -> Parser:
    parser = Parser(
        prog="perfdoctor run",
        usage="perfdoctor run [options] script.py args...\n       perfdoctor run [options] -m module args...",
        allow_abbrev=False,
        description="Run a training script and say which lines make it slow.",
    )
    parser.add_argument("--warmup", type=count, default=5, metavar="N", help="steps before anything is measured (5)")
    parser.add_argument("--active", type=count, default=10, metavar="N", help="steps in each phase (10)")
    parser.add_argument(
        "--keep-going", action="store_true", help="let the script run to its end, unwatched, instead of stopping it"
    )
    parser.add_argument(
        "--ranks", type=_ranks, metavar="LIST", help="under torchrun: the ranks that record, as in 0,3 (all)"
    )
    parser.add_argument(
        "--rank-timeout", type=float, default=60.0, metavar="S",
        help="under torchrun: how long rank 0 waits for the recordings of the others, in seconds (60)",
    )  # fmt: skip
    parser.add_argument("--save", metavar="FILE", default="", help="keep the recording; perfdoctor analyze reads it")
    add_output_options(parser)
    return parser


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))  # argparse turns the ValueError into a complaint


def _join(options: argparse.Namespace) -> RankGroup | None:
    """The ranks of this run under torchrun, None for a process on its own."""
    if "RANK" not in os.environ:  # torch need not be there for a complaint about the command line
        return None
    from perfdoctor.doors.rank_gathering import join_ranks

    return join_ranks(options.ranks, timeout_s=options.rank_timeout)


def _watch(command: Command, options: argparse.Namespace, ranks: RankGroup | None) -> ScriptRun:
    """The recording, the script's exit code, and whether it was stopped."""
    try:
        import torch
    except ImportError as error:
        raise UsageError(f"torch cannot be imported by {sys.executable} ({error}): install it there") from error
    from perfdoctor.doors.script import ScriptOptions, run_script
    from perfdoctor.doors.unwatched_rank import run_unwatched
    from perfdoctor.report.progress import ProgressLine

    runner = run_script if ranks is None or ranks.selected else run_unwatched
    with nullcontext() if torch.cuda.is_available() else _emulated() as device:
        run = runner(
            command.target,
            command.arguments,
            ScriptOptions(
                module=command.module,
                warmup=options.warmup,
                active=options.active,
                keep_going=options.keep_going,
                hits=None if device is None else device.log,
                progress=ProgressLine() if ranks is None or ranks.rank == 0 else None,
            ),
        )
    notes = () if device is None else device.notes
    return replace(run, capture=replace(run.capture, notes=(*run.capture.notes, *notes)))


def _emulated() -> Any:
    from perfdoctor.emulate import emulate_cuda

    print("perfdoctor: no GPU here: the script sees an emulated CUDA device", file=sys.stderr, flush=True)
    return emulate_cuda()


def _diagnosed(capture: Capture, command: Command, options: argparse.Namespace, ranks: RankGroup | None) -> Outcome:
    from perfdoctor.diagnose import diagnose_ranks
    from perfdoctor.report.page import Report

    captures, missing = [capture], {}
    if ranks is not None:
        with progress("waiting for the other ranks"):
            gathered = ranks.collect(capture)
        captures, missing = list(gathered.captures), gathered.missing
    if not captures:
        raise UsageError("no rank has a recording: " + "; ".join(f"rank {r}: {why}" for r, why in missing.items()))
    with progress("diagnosing"):
        found = replace(diagnose_ranks(captures, missing), source=command.target)
        report = Report.of(found, captures, script=command.typed)
    return deliver(report, options)
