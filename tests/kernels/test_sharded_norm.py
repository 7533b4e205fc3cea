"""DTensor gradients: two processes on the CPU, in which every norm is compared with that of the full tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed

import perfdoctor


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_norms_over_two_processes(tmp_path: Path) -> None:
    run_two_processes(tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_norms_over_two_gpus(tmp_path: Path) -> None:
    run_two_processes(tmp_path, "cuda")


def run_two_processes(folder: Path, device: str) -> None:
    root = str(Path(perfdoctor.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = str(Path(__file__).parent / "sharded_process.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(folder / "meet"), device],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
