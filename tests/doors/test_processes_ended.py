"""A trial that is ended by SIGTERM while treatments run in processes of their own leaves no process and no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import time
from perfdoctor.doors.treatment_processes import TreatmentProcesses
from perfdoctor.trial.process_run import ProcessOrder

with TreatmentProcesses(None, {}, lambda: 60.0) as processes:
    print(processes._server.pid, flush=True)
    while True:
        time.sleep(0.01)
"""


def _alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"  # a zombie waits for somebody to ask how it ended


def test_sigterm_ends_the_server_and_its_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], env=environment, stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        server = int(holder.stdout.readline())
        assert list(tmp_path.glob("perfdoctor-processes-*"))
        holder.send_signal(signal.SIGTERM)
        assert holder.wait(60) == -signal.SIGTERM
    until = time.monotonic() + 30
    while _alive(server) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _alive(server)
    assert list(tmp_path.iterdir()) == []
