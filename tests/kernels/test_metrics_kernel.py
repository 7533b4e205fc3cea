"""Triton's interpreter runs the metric kernels, in a process of its own; and what can be said without Triton."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import perfdoctor
from perfdoctor.errors import UsageError
from perfdoctor.kernels import metrics_reference
from perfdoctor.kernels.metrics_launch import Launcher, bits_of

CASES = Path(__file__).parent / "interpreted_metrics.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_in_the_interpreter() -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PERFDOCTOR_NO_COMPILER": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(perfdoctor.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_numbers_are_never_small_as_integers() -> None:
    """Triton gives an int below 2^31 another type, and the compiled kernel another signature."""
    for number in (0.0, -0.0, 1.0, 2.0, -1.0, 5e-324, 1e-300, 1e300, float("inf"), -float("inf"), float("nan")):
        assert not -(1 << 31) <= bits_of(number) < 1 << 31
        assert -(1 << 63) <= bits_of(number) < 1 << 63


def test_the_kernel_cannot_read_the_cpu() -> None:
    state = metrics_reference.new_state(torch.device("cpu"), 0.5)
    with pytest.raises(UsageError, match="kernel='triton' cannot read cpu tensors"):
        Launcher(state, "triton")
