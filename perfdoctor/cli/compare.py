"""`perfdoctor compare BEFORE AFTER`: did the edit help, beyond the noise, and did the report promise it rightly."""

from __future__ import annotations

import argparse
import filecmp
import math
import os
from collections.abc import Sequence
from dataclasses import replace

from perfdoctor.cli.output import Outcome, Parser, check_output
from perfdoctor.report.compare import (
    render_comparison_github,
    render_comparison_json,
    render_comparison_text,
    sentence,
)
from perfdoctor.trial.compared_run import read_run
from perfdoctor.trial.comparison import RUN_NOISE_RATIO, Change, Comparison, compare

_LATER_S = 1.0
_RENDERERS = {
    "text": render_comparison_text,
    "json": render_comparison_json,
    "github": render_comparison_github,
}


def execute(argv: Sequence[str]) -> Outcome:
    """Read both files, compare, render.

    Raises:
        UsageError: wrong options, or a file without timed steps.
        CaptureError, OSError: a file cannot be read.
    """
    options = _parser().parse_args(argv)
    check_output(options.output)
    found = compare(read_run(options.before), read_run(options.after), run_noise_ratio=options.run_noise / 100)
    if doubt := _of_the_files(options.before, options.after, found.change):
        found = replace(found, warnings=(doubt, *found.warnings))
    code, messages = (0, ()) if options.gate is None else _judge_gate(found, options.gate)
    text = _RENDERERS[options.format](found)
    return Outcome(text=text, path=options.output, exit_code=code, messages=messages)


def _of_the_files(before: str, after: str, change: Change) -> str:
    """What the files themselves say against the answer: one report given twice, or the two in the other order."""
    if filecmp.cmp(before, after, shallow=False):
        return "BEFORE and AFTER are the same report: nothing was compared"
    if not (os.path.isfile(before) and os.path.isfile(after)):  # a pipe was written just now
        return ""
    later = os.path.getmtime(before) - os.path.getmtime(after)
    if change is Change.SLOWER and later > _LATER_S:
        return "BEFORE was written after AFTER: if they are swapped, this is an edit that helped"
    return ""


def _judge_gate(found: Comparison, percent: float) -> tuple[int, tuple[str, ...]]:
    """The exit code and why. A gate that cannot judge does not pass: it is 2, as unreadable input is."""
    if found.incomparable:
        return 2, (f"--gate could not judge: {found.incomparable}",)
    if found.exceeds(percent):
        return 1, (f"gate: {sentence(found)} That is over {percent:g} %.",)
    return 0, ()


def _parser() -> Parser:
    parser = Parser(prog="perfdoctor compare", allow_abbrev=False, description=__doc__)
    form = "a report (--format json of run, analyze or trial), a saved capture, or a trace"
    parser.add_argument("before", metavar="BEFORE", help=form)
    parser.add_argument("after", metavar="AFTER", help="the same after the edit")
    parser.add_argument("--format", choices=tuple(_RENDERERS), default="text", help="of the answer (text)")
    parser.add_argument("-o", "--output", metavar="FILE", default="", help="write it there, whole or not at all")
    parser.add_argument(
        "--gate",
        metavar="PCT",
        type=_share,
        help="exit with 1 when AFTER is slower by more than PCT percent, and slower beyond the noise",
    )
    parser.add_argument(
        "--run-noise",
        metavar="PCT",
        type=_share,
        default=100 * RUN_NOISE_RATIO,
        help=f"what the step of one script differs by from process to process, one standard deviation "
        f"({100 * RUN_NOISE_RATIO:g}); 0 trusts the steps alone",
    )
    return parser


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no percentage of 0 or more")
    return value
