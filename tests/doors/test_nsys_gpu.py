"""The same script recorded by nsys and by torch.profiler on a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from nsys_agreement import compare

from perfdoctor.diagnose import diagnose
from perfdoctor.doors.nsys import record
from perfdoctor.doors.nsys_command import Options
from perfdoctor.record.capture import read_capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nsys") is None, reason="needs nsys (Nsight Systems) on PATH"),
]
ROOT = Path(__file__).resolve().parents[2]

LOOP = """
import time
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(4)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batch = torch.randn(8192, 4096, device="cuda")
total = 0.0
for _ in range(200):
    end = time.perf_counter() + 0.004
    while time.perf_counter() < end:
        pass
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(batch).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total += loss.item()
"""


def test_the_same_findings_counts_and_milliseconds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(LOOP)
    run = record([sys.executable, "loop.py"], Options(name="run"), print)
    if Path("run.qdstrm").exists():
        pytest.skip("needs an nsys that can import its recordings (the host part of Nsight Systems)")
    (capture,) = run.captures
    assert len(capture.work)
    assert len(capture.bare.step_ns) == 10
    watched = [sys.executable, "-m", "perfdoctor", "run", "--save", "profiler.perfdoctor", "loop.py"]
    subprocess.run(watched, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=300)
    rows = list(compare(diagnose(capture), diagnose(read_capture("profiler.perfdoctor"))))
    assert all(agrees for _, agrees in rows), "\n".join(text for text, agrees in rows if not agrees)


def test_only_the_window_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(LOOP)
    run = record([sys.executable, "loop.py"], Options(name="run", warmup=2, active=4), print)
    if Path("run.qdstrm").exists():
        pytest.skip("needs an nsys that can import its recordings (the host part of Nsight Systems)")
    (capture,) = run.captures
    first, last = capture.work.start_ns.min(), capture.work.end_ns.max()
    light = [index for index, end in enumerate(capture.steps.end_ns) if first < end <= last]
    assert len(light) >= 4
    assert first > capture.steps.start_ns[0]  # the steps with hooks came before the window
    assert capture.costs.measured
