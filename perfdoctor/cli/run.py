"""`perfdoctor run [options] script.py args...`: an unmodified script, watched.

Everything after the script (or after `-m module`) belongs to the script. Its own output is left alone; the report comes
after it. Where there is no GPU the script sees an emulated one.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from perfdoctor.cli.output import Outcome, Parser, add_output_options, check_output, count, deliver
from perfdoctor.cli.progress import progress
from perfdoctor.doors.script import output_aside
from perfdoctor.errors import UsageError
from perfdoctor.record.capture import Capture

if TYPE_CHECKING:
    from perfdoctor.doors.rank_gathering import RankGroup

# Own options that take no value. All others take one: the word after them is not the script.
_FLAGS = frozenset({"--keep-going", "--treat", "-h", "--help"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The words of a command line, split: perfdoctor's own options, the target, and what belongs to the script."""

    own: tuple[str, ...]
    target: str
    module: bool
    arguments: tuple[str, ...]


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
    with _unhurried(ranks), output_aside() if alone else nullcontext():
        outcome = _watched(command, options, ranks)
    if hint and outcome.exit_code:
        outcome = replace(outcome, messages=(*outcome.messages, hint))
    return replace(outcome, alone=alone)


def is_alone(options: argparse.Namespace) -> bool:
    """Whether the report is for a program that reads standard output: what the script prints goes elsewhere then."""
    return options.format != "text" and not options.output


def misplaced(command: Command, verb: str, parser: argparse.ArgumentParser) -> str:
    """Says on standard error, and returns, how to give perfdoctor the options that stand behind the script; '' where
    none of the script's options has the name of one of perfdoctor's."""
    own = {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}
    found = [word for word in command.arguments if word.partition("=")[0] in own]
    if not found:
        return ""
    target = f"-m {command.target}" if command.module else command.target
    names = ", ".join(dict.fromkeys(word.partition("=")[0] for word in found))
    hint = (
        f"{names} behind {target} went to the script. What is meant for perfdoctor stands in front of it: "
        f"perfdoctor {verb} {' '.join((*command.own, *_with_values(command.arguments, found)))} {target} ..."
    )
    print(f"perfdoctor: {hint}", file=sys.stderr, flush=True)
    return hint


def _with_values(words: Sequence[str], found: Sequence[str]) -> list[str]:
    """The options with the values that follow them."""
    taken: list[str] = []
    for word, value in zip(words, (*words[1:], ""), strict=True):
        if word in found and word not in taken:
            lacks = word not in _FLAGS and "=" not in word and bool(value)
            taken += [word, value] if lacks else [word]
    return taken


def _watched(command: Command, options: argparse.Namespace, ranks: RankGroup | None) -> Outcome:
    """Run the script, save, gather, report."""
    capture, exit_code = _watch(command, options, ranks)
    rank = capture.environment.rank or (ranks.rank if ranks is not None else 0)
    options.output, options.save = for_rank(options.output, rank), for_rank(options.save, rank)
    messages = []
    if options.save and (ranks is None or ranks.selected):
        capture.save(options.save)
        messages.append(f"saved the recording in {options.save}")
    if exit_code != 0:
        messages.append(f"the script ended with exit code {exit_code}")
    if ranks is not None and rank != 0:  # one rank speaks, all write their recordings
        ranks.publish(capture)
        messages += [ranks.problem] if ranks.problem else []
        return Outcome(text="", exit_code=exit_code, messages=tuple(messages))
    outcome = _diagnosed(capture, command.target, options, ranks)
    text = outcome.text if outcome.path or rank == 0 else ""
    return replace(
        outcome, text=text, exit_code=exit_code or outcome.exit_code, messages=(*messages, *outcome.messages)
    )


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


@contextmanager
def _unhurried(ranks: RankGroup | None) -> Iterator[None]:
    """Under torchrun SIGTERM says that another rank has died: it ends the script as an exit does, and the report comes
    all the same. torchrun gives it 30 s."""
    if ranks is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if _is_in_script(frame):
            raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_in_script(frame: FrameType | None) -> bool:
    """Whether the script is still running: then there is something to end."""
    while frame is not None:
        if frame.f_code.co_name == "execute_program":
            return True
        frame = frame.f_back
    return False


def _watch(command: Command, options: argparse.Namespace, ranks: RankGroup | None) -> tuple[Capture, int]:
    """The recording and the script's exit code."""
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
    return replace(run.capture, notes=(*run.capture.notes, *notes)), run.exit_code


def _emulated() -> Any:
    from perfdoctor.emulate import emulate_cuda

    print("perfdoctor: no GPU here: the script sees an emulated CUDA device", file=sys.stderr, flush=True)
    return emulate_cuda()


def _diagnosed(capture: Capture, target: str, options: argparse.Namespace, ranks: RankGroup | None) -> Outcome:
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
        report = Report.of(replace(diagnose_ranks(captures, missing), source=target), captures)
    return deliver(report, options)
