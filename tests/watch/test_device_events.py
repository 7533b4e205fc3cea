"""What a forked worker inherits is not collected there: in real processes, with real workers."""

from __future__ import annotations

import subprocess
import sys

import pytest

CYCLE = """
import gc, os, sys
from perfdoctor.watch.device_events import leave_to_parent

class Held:
    def __init__(self):
        self.itself = self
    def __del__(self):
        os.write(1, b"destroyed by %s\\n" % (b"the parent" if os.getpid() == parent else b"a child"))

def collect_in_child():
    child = os.fork()
    if not child:
        Held()
        os._exit(gc.collect() == 0)
    assert os.waitpid(child, 0)[1] == 0

parent = os.getpid()
gc.disable()
Held()
"""
WORKERS = """
import gc
import torch
import perfdoctor

class Collecting(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        gc.collect()
        return torch.ones(2)

def abandon():
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    cycle = [event, torch.ones(2, device="cuda"), torch.cuda.Stream()]
    cycle.append(cycle)

if __name__ == "__main__":
    torch.ones(1, device="cuda")
    model = torch.nn.Linear(2, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(Collecting(), batch_size=2, num_workers=1)
    gc.disable()
    with perfdoctor.watch(warmup=1, active=2):
        for _ in range(6):
            abandon()
            for batch in loader:
                model(batch.cuda()).sum().backward()
                optimizer.step()
    print("trained")
"""


def _said(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_child_leaves_what_it_inherits_and_collects_its_own() -> None:
    # Once without, then with: each child makes one cycle of its own, and the parent's is the parent's to collect.
    without = _said(CYCLE + "collect_in_child(); gc.collect()")
    assert without == ["destroyed by a child", "destroyed by a child", "destroyed by the parent"]
    told = CYCLE + "leave_to_parent(); leave_to_parent(); collect_in_child(); gc.collect()"
    assert _said(told) == ["destroyed by a child", "destroyed by the parent"]


@pytest.mark.gpu
def test_workers_of_a_watched_loop_survive_what_was_let_go_of_on_the_device() -> None:
    assert "trained" in _said(WORKERS)
