"""`perfdoctor nsys [options] -- python train.py args...`: record a command with Nsight Systems and say what it loses.

The command stays as the user types it: `python script.py`, `python -m module`, `torchrun ... script.py`, or anything
else. Files are NAME.nsys-rep, NAME.sqlite and NAME.sites.json; of several ranks NAME_0.nsys-rep and so on.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from perfdoctor.cli.output import Outcome, Parser, add_output_options, check_output, complain, count, deliver
from perfdoctor.cli.progress import progress
from perfdoctor.diagnose import diagnose_ranks
from perfdoctor.doors.nsys import NsysRun, record
from perfdoctor.doors.nsys_command import Options, default_name
from perfdoctor.errors import INTERRUPTED, UsageError
from perfdoctor.record.nsys_scrub import scrub_export
from perfdoctor.report.page import Report
from perfdoctor.units import format_plural


def execute(argv: Sequence[str]) -> Outcome:
    """Record, export, diagnose. The script's own exit code wins where it is not 0.

    Raises:
        UsageError: wrong options, no nsys, no command, or nothing was recorded.
        OSError: a file cannot be read or written.
    """
    own, words = _split(argv)
    options = _parser().parse_args(own)
    if options.scrub:
        return _scrub(options.scrub)
    if not words:
        raise UsageError("no command: perfdoctor nsys [options] -- python train.py args... (--help lists the options)")
    check_output(options.output)
    name = options.name or default_name(words)
    _check_name(name)
    run = record(
        words,
        Options(
            name=name,
            warmup=options.warmup,
            active=options.active,
            keep_going=options.keep_going,
            trace=options.trace,
            extra=tuple(options.extra),
        ),
        complain,
        whole=options.whole,
        limit_s=options.limit,
    )
    return _report(run, words, options)


def _report(run: NsysRun, words: Sequence[str], options: argparse.Namespace) -> Outcome:
    code = INTERRUPTED if run.interrupted else run.exit_code
    messages = run.messages
    if code not in (0, INTERRUPTED):
        messages = (f"the command ended with exit code {code}", *messages)
    if not run.captures:
        if code == 0:
            raise UsageError("; ".join(run.messages) or "nothing was recorded")
        return Outcome(text="", exit_code=code, messages=messages)
    with progress("diagnosing"):
        diagnosis = diagnose_ranks(run.captures, run.missing)
        report = Report.of(replace(diagnosis, source=shlex.join(words)), run.captures, script=script_of(words))
    outcome = deliver(report, options)
    return replace(outcome, exit_code=code or outcome.exit_code, messages=(*messages, *outcome.messages))


def script_of(words: Sequence[str]) -> str:
    """What `perfdoctor trial` takes of a command: what stands behind python; '' where python has options of its own,
    or something else starts it (`python -m torch.distributed.run` does)."""
    first = words[1] if len(words) > 1 and Path(words[0]).name.startswith("python") else "-"
    launched = first == "-m" and words[2:3] and words[2].startswith("torch.distributed.")
    return "" if launched or (first.startswith("-") and first != "-m") else shlex.join(words[1:])


def _scrub(files: Sequence[str]) -> Outcome:
    lines = []
    for file in files:
        done = scrub_export(Path(file))
        gone = f"{format_plural(done.num_rows, 'row')} and {format_plural(done.num_strings, 'string')}"
        lines.append(
            f"{file}: {gone} of the environment deleted. Names of processes, threads and folders are still in it.\n"
        )
    return Outcome(text="".join(lines))


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Own options, and the command: what follows `--`, or the first word that is no option."""
    flags = {"--keep-going", "--whole", "-h", "--help"}
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "--":
        if argv[at] == "--scrub":  # files, no command
            return list(argv), []
        at += 1 if argv[at] in flags or "=" in argv[at] else 2
    rest = list(argv[at:])
    return list(argv[:at]), rest[1:] if rest[:1] == ["--"] else rest


def _check_name(name: str) -> None:
    folder = Path(name).parent
    if not folder.is_dir():
        raise UsageError(f"--name {name}: the folder {folder} is not there")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--name {name}: the folder {folder.absolute()} is not writable; name the files elsewhere")
    if "%" in name:
        raise UsageError(f"--name {name}: give it without %; of several ranks each gets its number at the end")


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text}: expected seconds, more than 0")
    return value


def _parser() -> Parser:
    parser = Parser(
        prog="perfdoctor nsys",
        usage="perfdoctor nsys [options] -- python train.py args...\n"
        "       perfdoctor nsys [options] -- torchrun ... train.py args...\n"
        "       perfdoctor nsys --scrub FILE.sqlite ...",
        allow_abbrev=False,
        description="Record a command with Nsight Systems and say which lines make it slow.",
    )
    parser.add_argument("--name", default="", help="of the files: NAME.nsys-rep, .sqlite, .sites.json (train_nsys)")
    parser.add_argument("--warmup", type=count, default=5, metavar="N", help="steps before anything is measured (5)")
    parser.add_argument("--active", type=count, default=10, metavar="N", help="steps in each phase (10)")
    parser.add_argument(
        "--keep-going", action="store_true", help="let the script run to its end, instead of stopping it"
    )
    parser.add_argument("--whole", action="store_true", help="record the whole run, not only a window of some steps")
    parser.add_argument("--trace", default="cuda,nvtx,osrt", metavar="WHAT", help="for nsys (cuda,nvtx,osrt)")
    parser.add_argument(
        "--extra",
        action="append",
        default=[],
        metavar="OPTION",
        help="a further option for nsys, as in --extra=--stats=true",
    )
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="seconds that nsys has after the script to write its report (600)",
    )
    parser.add_argument(
        "--scrub",
        nargs="+",
        metavar="FILE",
        help="delete the environment variables from these SQLite exports, and do no more",
    )
    add_output_options(parser)
    return parser
