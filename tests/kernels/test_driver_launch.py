"""The compiled launches, in a process of their own where a stand-in for the CUDA driver notes what it is given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import perfdoctor

HERE = Path(__file__).parent


def test_compiled_launches(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA driver; the GPU tests launch through the real one")
    library = tmp_path / "libcuda.so.1"
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", soname, "-o", str(library), str(HERE / "driver_stand_in.c")], check=True
    )
    environment = {
        **os.environ,
        "DRIVER_STAND_IN": str(library),
        "PYTHONPATH": os.pathsep.join([str(Path(perfdoctor.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "driven_launches.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "no C++ compiler" in done.stdout
