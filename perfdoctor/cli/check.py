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

from perfdoctor.cli.output import Outcome, Parser, check_output, write_whole
from perfdoctor.cli.run import split_command
from perfdoctor.errors import UsageError
from perfdoctor.record.owners import package_path

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
    known = _read_baseline(options.baseline) if options.baseline else frozenset()
    from perfdoctor.doors.check import check_script

    report = check_script(
        command.target,
        command.arguments,
        module=command.module,
        max_steps=options.steps,
        on_gpu=options.device == "gpu",
    )
    if options.write_baseline:
        write_whole(options.write_baseline, _baseline(report))
        return Outcome(text="", messages=(f"wrote {len(report.sites)} known sites to {options.write_baseline}",))
    new = replace(report, sites=tuple(site for site in report.sites if _name(site) not in known))
    over = new.syncs_per_step > options.budget or any(
        site.meaning.code == "unsynchronised-read" for site in new.failing
    )
    return Outcome(
        text=_rendered(new, len(report.sites) - len(new.sites), options), path=options.output, exit_code=int(over)
    )


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
        "--device", choices=("emulated", "gpu"), default="emulated", help="where to run the script (emulated)"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="stop the script after N steps (20)")
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
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text}: a budget is 0 or more")
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
        return _text(report, num_known, options.budget)
    diagnosis = diagnosis_of(report)
    if options.format == "json":
        return render_json(diagnosis)
    return (render_sarif if options.format == "sarif" else render_github)(diagnosis, os.getcwd())


def _text(report: CheckReport, num_known: int, budget: float) -> str:
    lines = [
        f"{report.source}: {report.syncs_per_step:.3g} syncs a step, {budget:g} allowed "
        f"({report.num_steps} steps on {report.device})"
    ]
    for title, sites in (("every step", report.per_step), ("now and then", report.occasional)):
        if sites:
            lines += ["", f"{title}:"]
            lines += [row for site in sites for row in _rows(site)]
    lines += [""] if num_known or report.notes else []
    lines += [f"{num_known} sites of the baseline are left out"] if num_known else []
    lines += [f"note: {note.text}" for note in report.notes]
    return "\n".join(lines) + "\n"


def _rows(site: CheckedSite) -> list[str]:
    from perfdoctor.report.annotations import relative_path

    frame = site.site.frame
    where = f"{relative_path(frame.file, os.getcwd())}:{frame.line}"
    library = site.site.library
    through = f" (inside {package_path(library.file)}:{library.line})" if library is not None else ""
    rows = [f"  {where}  {site.kind}, {site.count:.3g} a step: {site.meaning.phrase}{through}"]
    rows += [f"      {site.site.text}"] if site.site.text else []
    return [*rows, f"      -> {site.meaning.advice}"]
