"""The report that the README shows is the one that its command prints."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_report_in_the_readme_is_printed_by_the_recording_beside_it() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    block = re.search(r"<!-- REPORT: begin -->\n```\n(.*?)\n```", readme, re.DOTALL)
    assert block is not None
    command = [sys.executable, "-m", "perfdoctor", "analyze", "examples/slow_loop.perfdoctor"]
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    shown = block[1].splitlines()
    assert len(shown) > 20
    assert done.stdout.splitlines()[: len(shown)] == shown


def test_the_diff_in_the_readme_is_that_of_the_two_loops() -> None:
    """From the first function that differs on, with a line around each change."""
    readme = (ROOT / "README.md").read_text("utf-8")
    block = re.search(r"<!-- DIFF: begin -->\n```diff\n(.*?)\n```", readme, re.DOTALL)
    assert block is not None
    slow, fast = ((ROOT / "examples" / f"{name}_loop.py").read_text("utf-8") for name in ("slow", "fast"))
    code = slow[slow.index("def gradient_norm") :], fast[fast.index("def report") :]
    changes = difflib.unified_diff(*(text.splitlines() for text in code), n=1, lineterm="")
    assert block[1].splitlines() == [re.sub("^@@.*", "@@", line) for line in changes][2:]


def test_the_recording_is_small_and_names_no_folder() -> None:
    from perfdoctor.record.capture import read_capture

    path = ROOT / "examples" / "slow_loop.perfdoctor"
    capture = read_capture(path)
    assert path.stat().st_size < 300_000
    assert capture.full is not None
    sites = (*capture.sites, *capture.full.sites)
    files = {frame.file for site in sites for frame in (site.frame, site.library, site.caller) if frame}
    assert files
    assert not [file for file in files if file.startswith("/")]
