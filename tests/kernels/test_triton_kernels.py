"""Triton's interpreter runs the kernels: it must be chosen before Triton is imported, so in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import perfdoctor


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("cases", ["interpreted_cases.py", "interpreted_metrics.py"])
def test_kernels_in_the_interpreter(cases: str) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PERFDOCTOR_NO_COMPILER": "1",  # the walk in Python; test_walker.py holds the compiled one to it
        "PYTHONPATH": os.pathsep.join([str(Path(perfdoctor.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
