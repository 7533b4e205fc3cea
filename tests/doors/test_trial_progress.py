"""`perfdoctor trial` says how far it is, on standard error alone, and its JSON stands alone on standard output."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
print("of the script")
for epoch in range(1000):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.004)
"""


@pytest.mark.parametrize("treat", [False, True])
def test_a_trial_says_how_far_it_is_and_its_json_stands_alone(tmp_path: Path, treat: bool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    what = ("--treat=gc_frozen", "--seconds", "6") if treat else ("--seconds", "4")
    reader, writer = pty.openpty()
    said: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(reader, 4096):
                said.append(data)
        except OSError:  # the other end is closed
            pass

    listener = threading.Thread(target=read)
    listener.start()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "200"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "perfdoctor", "trial", *what, "--format", "json", "train.py"],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=writer, text=True, timeout=120,
        )  # fmt: skip
    finally:
        os.close(writer)
        listener.join()
        os.close(reader)
    error = b"".join(said).decode()
    assert done.returncode == 0, error
    json.loads(done.stdout)
    assert "of the script" in error
    pattern = r"perfdoctor: \d s, trial, .* of at most 4 s"
    if treat:
        pattern = r"perfdoctor: \d+ s, (trying gc_frozen|the loop as it is), \d of 1 treatment judged"
    assert re.search(pattern, error), error
