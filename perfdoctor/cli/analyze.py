"""`perfdoctor analyze FILE...`: a report on recordings that exist already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perfdoctor.cli.output import Outcome, Parser, add_output_options, check_output, deliver
from perfdoctor.cli.progress import progress
from perfdoctor.doors.analysis import analyze
from perfdoctor.units import format_bytes


def execute(argv: Sequence[str]) -> Outcome:
    """Read the files, diagnose, render.

    Raises:
        UsageError: wrong options.
        CaptureError, OSError: a file cannot be read.
    """
    options = _parser().parse_args(argv)
    check_output(options.output)
    with progress(f"reading {_describe(options.files)}"):
        report = analyze(*options.files)
    return deliver(report, options)


def _parser() -> Parser:
    parser = Parser(prog="perfdoctor analyze", allow_abbrev=False, description="Say what a recording loses, and where.")
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="torch.profiler JSON (.json, .json.gz), Nsight Systems SQLite or .nsys-rep, or a saved capture; "
        "several files are the ranks of one run",
    )
    add_output_options(parser)
    return parser


def _describe(paths: Sequence[str]) -> str:
    size = format_bytes(sum(Path(path).stat().st_size for path in paths if Path(path).is_file()))
    return f"{paths[0]} ({size})" if len(paths) == 1 else f"{len(paths)} ranks ({size})"
