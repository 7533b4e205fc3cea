"""The script inside nsys (nsys_child.py): watched, its phases as NVTX ranges; at the end the sites file."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from perfdoctor.doors.nsys_command import UMASK
from perfdoctor.doors.script import ScriptOptions, run_script
from perfdoctor.doors.session import Session
from perfdoctor.errors import PerfDoctorError
from perfdoctor.record.sites_file import Sites, write_sites
from perfdoctor.watch.nsys_window import NsysWindow
from perfdoctor.watch.phase_annotations import PhaseAnnotations
from perfdoctor.watch.plan import Stage


def run_inside(argv: Sequence[str]) -> int:
    """Run the script to its end, or until it has been watched; give back its exit code."""
    own, words = _split(argv)
    options = _parser().parse_args(own)
    if UMASK in os.environ:  # nsys starts its programs with an umask of 0
        os.umask(int(os.environ.pop(UMASK), 8))
    target = Path(expand(options.sites)).absolute()  # now: the script may change the folder, or its environment
    marks: dict[int, int] = {}
    try:
        run = run_script(
            words[0],
            words[1:],
            ScriptOptions(
                module=options.module,
                warmup=options.warmup,
                active=options.active,
                keep_going=options.keep_going,
                around=lambda session: _annotated(session, marks),
            ),
        )
        sites = Sites(capture=run.capture, marks=marks, exit_code=run.exit_code)
        write_sites(sites, target)
    except (PerfDoctorError, OSError) as error:
        print(f"perfdoctor: {error}", file=sys.stderr, flush=True)
        return 2
    return run.exit_code


def expand(path: str) -> str:
    """`path` with `%q{NAME}` replaced by the environment's NAME, as nsys does with the name of its report."""
    return re.sub(r"%q\{(\w+)\}", lambda match: os.environ.get(match[1], ""), path)


@contextmanager
def _annotated(session: Session, marks: dict[int, int]) -> Iterator[None]:
    """The session records through nsys, its steps and their phases are NVTX ranges. Their ends go into `marks`."""
    annotations = PhaseAnnotations()
    recorder = session.recorder
    recorder.windows = {Stage.LIGHT: NsysWindow()}

    def close_step() -> None:
        annotations.close_step()
        marks[annotations.number] = time.time_ns()

    recorder.step_closed, recorder.step_opened = close_step, annotations.open_step
    annotations.install()
    try:
        yield
    finally:
        annotations.remove()


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    at = argv.index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="perfdoctor.doors.nsys_child", allow_abbrev=False)
    parser.add_argument("--sites", required=True)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--active", type=int, default=10)
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--module", action="store_true")
    return parser
