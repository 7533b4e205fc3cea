"""`perfdoctor check [options] script.py args...`: every sync of a step, found without a GPU.

Exit codes: 0 within the budget, 1 over it, 2 could not run.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfdoctor.cli.output import Outcome, Parser, check_output, number, whole_number, write_whole
from perfdoctor.cli.run import misplaced, split_command
from perfdoctor.errors import UsageError
from perfdoctor.record.owners import package_path
from perfdoctor.record.sync_kinds import UNSYNCHRONISED_READ
from perfdoctor.units import format_plural

if TYPE_CHECKING:
    from perfdoctor.doors.check import CheckedSite, CheckReport

_BASELINE_VERSION = 1
# Half a sync a step: a read on every tenth step passes, one on every step does not.
_BUDGET = 0.5


def execute(argv: Sequence[str]) -> Outcome:
    """Run the script on the emulated device and hold it against the budget and the baseline.

    Raises:
        UsageError: wrong options, no such script, the script failed, or the baseline is none.
        OSError: the report or the baseline cannot be written.
    """
    command = split_command(argv)
    options = _parser().parse_args(command.own)
    if not command.target:
        raise UsageError(
            "no script: perfdoctor check [options] script.py args..., or -m module (--help lists the options)"
        )
    check_output(options.output)
    hint = misplaced(command, "check", _parser())
    known = _read_baseline(options.baseline) if options.baseline else frozenset()
    from perfdoctor.doors.check import check_script

    report = check_script(
        command.target,
        command.arguments,
        module=command.module,
        max_steps=options.steps,
        on_gpu=options.device == "real",
    )
    if options.write_baseline:
        write_whole(options.write_baseline, _baseline(report))
        written = f"wrote {format_plural(len(report.sites), 'known site')} to {options.write_baseline}"
        return Outcome(text="", messages=(written,))
    new = replace(report, sites=tuple(site for site in report.sites if _name(site) not in known))
    over = _is_over(new, options)
    num_known = len(report.sites) - len(new.sites)
    return Outcome(
        text=_rendered(new, num_known, options),
        path=options.output,
        exit_code=int(over),
        messages=_messages(new, num_known, options, over=over) + ((hint,) if hint and over else ()),
    )


def _is_over(new: CheckReport, options: argparse.Namespace) -> bool:
    return new.syncs_per_step > options.budget or any(site.meaning.code == UNSYNCHRONISED_READ for site in new.failing)


def _messages(new: CheckReport, num_known: int, options: argparse.Namespace, *, over: bool) -> tuple[str, ...]:
    """The verdict on standard error, where the report does not begin with it or goes elsewhere."""
    if options.format == "text" and not options.output:
        return ()
    return (_held_against(new, num_known, options, over=over),)


def _held_against(new: CheckReport, num_known: int, options: argparse.Namespace, *, over: bool) -> str:
    """What was held against what, in one line."""
    what = f"sites not in {options.baseline}" if options.baseline else "its sites"
    text = (
        f"{'over' if over else 'within'} the budget: {new.source}: {what} make "
        f"{format_plural(new.syncs_per_step, 'sync')} a step, {options.budget:g} allowed "
        f"({format_plural(new.num_steps, 'step')} on {new.device})"
    )
    if any(site.meaning.code == UNSYNCHRONISED_READ for site in new.failing):
        text += "; a read before its copy has arrived is never allowed"
    return f"{text}; {_left_out(num_known, options.baseline)}" if options.baseline else text


def _left_out(num_known: int, baseline: str) -> str:
    return f"{format_plural(num_known, 'site')} of the baseline {baseline} left out"


def _parser() -> Parser:
    parser = Parser(
        prog="perfdoctor check",
        usage="perfdoctor check [options] script.py args...\n       perfdoctor check [options] -m module args...",
        allow_abbrev=False,
        description="Find every sync of a training step without a GPU, on an emulated CUDA device.",
    )
    parser.add_argument(
        "--budget", type=_not_negative, default=_BUDGET, metavar="N",
        help="syncs a step that are allowed (0.5); one on every tenth step counts as 0.1",
    )  # fmt: skip
    parser.add_argument(
        "--device",
        choices=("emulated", "real"),
        default="emulated",
        help="real: the CUDA device that is there (emulated)",
    )
    parser.add_argument("--steps", type=_steps, default=20, metavar="N", help="stop the script after N steps (20)")
    parser.add_argument(
        "--format", choices=("text", "json", "sarif", "github"), default="text", help="of the report (text)"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="", help="write the report there, whole or not at all"
    )
    parser.add_argument(
        "--baseline", metavar="FILE", default="", help="sites listed there do not count: only new ones fail"
    )
    parser.add_argument("--write-baseline", metavar="FILE", default="", help="list the sites of today there")
    return parser


def _not_negative(text: str) -> float:
    value = number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text}: a budget is 0 or more")
    return value


def _steps(text: str) -> int:
    value = whole_number(text)
    if value < 3:
        raise argparse.ArgumentTypeError(f"{text}: at least 3 are needed, to tell a step from set-up")
    return value


def _name(site: CheckedSite) -> str:
    from perfdoctor.report.annotations import fingerprint

    return fingerprint(site.site, site.kind, os.getcwd())


def _baseline(report: CheckReport) -> str:
    from perfdoctor.report.annotations import relative_path

    rows = [
        {
            "fingerprint": _name(site),
            "file": relative_path(site.site.frame.file, os.getcwd()),
            "line": site.site.frame.line,
            "kind": site.kind,
            "text": site.site.text,
        }
        for site in report.sites
    ]
    return json.dumps({"perfdoctor_baseline": _BASELINE_VERSION, "sites": rows}, indent=2) + "\n"


def _read_baseline(path: str) -> frozenset[str]:
    try:
        document: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["perfdoctor_baseline"] != _BASELINE_VERSION:
            raise UsageError(
                f"{path}: baseline version {document['perfdoctor_baseline']}; write it again (--write-baseline)"
            )
        return frozenset(row["fingerprint"] for row in document["sites"])
    except OSError as error:
        raise UsageError(f"cannot read the baseline {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: no baseline of perfdoctor; make one with --write-baseline") from error


def _rendered(report: CheckReport, num_known: int, options: argparse.Namespace) -> str:
    from perfdoctor.doors.check import diagnosis_of
    from perfdoctor.report.annotations import render_github, render_sarif
    from perfdoctor.report.json import render_json

    if options.format == "text":
        return _text(report, num_known, options)
    diagnosis = diagnosis_of(report)
    if options.format == "json":
        return render_json(diagnosis)
    return (render_sarif if options.format == "sarif" else render_github)(diagnosis, os.getcwd())


def _text(report: CheckReport, num_known: int, options: argparse.Namespace) -> str:
    new = " not in the baseline" if options.baseline else ""
    verdict = "over" if _is_over(report, options) else "within"
    lines = [
        f"{report.source}: {format_plural(report.syncs_per_step, 'sync')} a step{new}, {options.budget:g} allowed: "
        f"{verdict} the budget ({format_plural(report.num_steps, 'step')} on {report.device})"
    ]
    for title, sites in (("every step", report.per_step), ("now and then", report.occasional)):
        if sites:
            lines += ["", f"{title}:"]
            lines += [row for site in sites for row in _rows(site)]
    lines += [""] if options.baseline or report.notes else []
    lines += [_left_out(num_known, options.baseline)] if options.baseline else []
    lines += [f"note: {note.text}" for note in report.notes]
    return "\n".join(lines) + "\n"


def _rows(site: CheckedSite) -> list[str]:
    from perfdoctor.report.annotations import relative_path

    frame = site.site.frame
    where = f"{relative_path(frame.file, os.getcwd())}:{frame.line}"
    library = site.site.library
    through = f" (inside {package_path(library.file)}:{library.line})" if library is not None else ""
    often = "" if site.per_step else " on average"
    rows = [f"  {where}  {site.kind}, {site.count:.3g} a step{often}: {site.meaning.phrase}{through}"]
    rows += [f"      {site.site.text}"] if site.site.text else []
    return [*rows, f"      -> {site.advice.text}"]
