"""What importing and analysing must not pull in, seen from fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "triton", "lightning", "pytorch_lightning", "tensorboard", "transformers")


def loaded_after(program: str, *arguments: str) -> set[str]:
    """The heavy packages (and numpy) that are in sys.modules after the program ran."""
    tail = "\nimport sys, json\nprint('\\n' + json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", program + tail, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1])) & {*HEAVY, "numpy"}


def test_importing_perfdoctor_loads_nothing_heavy() -> None:
    assert loaded_after("import perfdoctor") == set()


def test_importing_torch_would_be_seen() -> None:
    pytest.importorskip("torch")
    assert "torch" in loaded_after("import torch")


def test_analyze_does_not_load_torch(trace: Path) -> None:
    program = "import sys\nfrom perfdoctor.cli import main\nassert main(['analyze', sys.argv[1]]) == 0"
    assert loaded_after(program, str(trace)) == {"numpy"}


def test_analyze_through_the_library_does_not_load_torch(trace: Path) -> None:
    program = "import sys, perfdoctor\nprint(perfdoctor.analyze(sys.argv[1]))"
    assert loaded_after(program, str(trace)) == {"numpy"}
