"""What the verbs share: options for the output, the gate, and a file that is written whole or not at all."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from perfdoctor.diagnose.finding import Diagnosis, Finding
from perfdoctor.errors import UsageError
from perfdoctor.report import phrases
from perfdoctor.report.page import Report
from perfdoctor.units import format_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a verb has to say: `text` for standard output, or for the file `path`; `messages` for standard error."""

    text: str
    path: str = ""
    exit_code: int = 0
    messages: tuple[str, ...] = ()
    alone: bool = False  # nothing else may stand on standard output, from the script's first line to the exit


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaints are a UsageError: one line, and no exit from inside."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists the options)")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """`--format`, `-o` and `--gate`."""
    parser.add_argument("--format", choices=("text", "json", "html"), default="text", help="of the report (text)")
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="", help="write the report there, whole or not at all"
    )
    parser.add_argument(
        "--gate",
        metavar="PCT",
        type=_percent,
        help="exit with 1 when a finding would give back more than PCT percent of the step",
    )


def count(text: str) -> int:
    """The type of an option that takes a number of things, 1 or more."""
    value = whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least one is needed")
    return value


def whole_number(text: str) -> int:
    """An option's text as a whole number; ArgumentTypeError says that it is none."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def number(text: str) -> float:
    """An option's text as a number; ArgumentTypeError says that it is none."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def _percent(text: str) -> float:
    value = number(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is no percentage from 0 to 100")
    return value


def complain(message: str) -> None:
    """A line on standard error, under our name."""
    print(f"perfdoctor: {message}", file=sys.stderr, flush=True)


def check_output(path: str, option: str = "-o") -> None:
    """Complain before the work, not after it, about a report file that cannot be written.

    Raises:
        UsageError: the folder is not there or not writable, or the path is a folder.
    """
    folder = Path(path).parent
    if not path:
        return
    if Path(path).is_dir():
        raise UsageError(f"{option} {path}: is a folder; name a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {path}: the folder {folder} is not there or not writable")


def write_whole(path: str, text: str) -> None:
    """Write the file under another name and move it into place; a device or a pipe is written to, never replaced.

    Raises:
        OSError: it cannot be written, naming the file; nothing is left behind.
    """
    content = text.encode("utf-8", "replace")  # a file name that is no UTF-8 may stand in the report
    target = Path(os.path.realpath(path))  # a link stays a link
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        partial = target.with_name(target.name + ".part")
        try:
            partial.write_bytes(content)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"it cannot be written there ({error.strerror or error})", path) from error


def deliver(report: Report, options: argparse.Namespace) -> Outcome:
    """The report in the wanted form, with the exit code that the gate asks for."""
    code, messages = (0, ()) if options.gate is None else judge_gate(report, options.gate)
    return Outcome(text=_rendered(report, options), path=options.output, exit_code=code, messages=messages)


def _rendered(report: Report, options: argparse.Namespace) -> str:
    if options.format == "json":
        return report.to_json()
    if options.format == "html":
        return report.to_html()
    return report.to_text() if options.output else f"{report}\n"


def judge_gate(diagnosis: Diagnosis, percent: float) -> tuple[int, tuple[str, ...]]:
    """The exit code of `--gate` and why: 1 when a finding would give back more than `percent` of the step.

    A gate that cannot judge does not pass: it is 2, as unreadable input is.
    """
    judged = [(f, ratio) for f in diagnosis.findings if (ratio := phrases.step_ratio(f, diagnosis.step)) is not None]
    over = [_gate_line(finding, ratio, percent) for finding, ratio in judged if 100 * ratio > percent]
    if over:
        return 1, tuple(over)
    if diagnosis.step is None:
        return 2, ("--gate could not judge: no step was timed",)
    unknown = [finding for finding in diagnosis.findings if finding.headroom is None and finding.withheld]
    if unknown and not judged:
        return 2, (f"--gate could not judge: {unknown[0].withheld}",)
    return 0, ()


def _gate_line(finding: Finding, ratio: float, percent: float) -> str:
    return f"gate: {phrases.where(finding)} {finding.code} would give back {format_share(ratio)}, over {percent:g} %"
