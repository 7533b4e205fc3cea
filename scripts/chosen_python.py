"""The python that scripts/choose_python names, for the scripts that are themselves in Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def chosen_python(*needed: str) -> str:
    """Full path; the process ends where there is none: choose_python has said why."""
    command = [str(Path(__file__).with_name("choose_python")), *needed]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip() if done.returncode == 0 else sys.exit(done.returncode)
