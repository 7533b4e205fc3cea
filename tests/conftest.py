"""What every room's tests share: a small recording, no deadlines, and GPU tests that wait for a machine with a GPU."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# As of a job in the background (`nohup scripts/test &`): scripts that tests interrupt would inherit that.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)

# An example that takes long is no fault: this says nothing about speed, and a busy machine takes as long as it likes.
# CI asks whether something that worked is broken, with the same examples each time; new ones are looked for by hand.
settings.register_profile("untimed", settings(), deadline=None, derandomize="SAME_EXAMPLES" in os.environ)
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """What libraries set for good: Lightning's Trainer ignores Ctrl-C once it was interrupted, and processes of later
    tests would, too; a process group of torch's puts its rank in front of each traceback."""
    before, hook = signal.getsignal(signal.SIGINT), sys.excepthook
    try:
        return (yield)
    finally:
        sys.excepthook = hook
        if signal.getsignal(signal.SIGINT) is not before:
            signal.signal(signal.SIGINT, before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where torch sees none. torch is imported only when there is such a test."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def trace_events(num_steps: int = 6) -> list[dict[str, Any]]:
    """A host-bound loop in torch.profiler's form, 10 ms a step: two kernels, then `.item()` waits for them.

    Each step: launches at 1 and 2 ms, kernels 1.1 to 2.1 and 2.1 to 4.1 ms, a read from 3 to 4.2 ms, then 5.8 ms of
    host work before the next step. Times in us.
    """
    events: list[dict[str, Any]] = []

    def add(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> None:
        events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args})

    for step in range(num_steps):
        start = 1000 + 10_000 * step
        ids = [10 * step + i for i in range(1, 4)]
        add("user_annotation", f"ProfilerStep#{step}", start, 10_000)
        for i, (at, length) in enumerate(((1000, 1000), (2000, 2000))):
            add("cuda_runtime", "cudaLaunchKernel", start + at, 10, correlation=ids[i])
            kernel_at = start + 1100 + 1000 * i
            add("kernel", "ampere_sgemm_128x64_nn", kernel_at, length, 7, device=0, stream=7, correlation=ids[i])
        add("cpu_op", "aten::item", start + 2990, 1220)
        add("cuda_runtime", "cudaMemcpyAsync", start + 3000, 10, correlation=ids[2])
        add(
            "gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", start + 4100, 2, 7,
            device=0, stream=7, correlation=ids[2], bytes=4,
        )  # fmt: skip
        add("cuda_runtime", "cudaStreamSynchronize", start + 3010, 1190, correlation=ids[2] + 5)
    return events


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    document = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA A100"}],
        "traceEvents": trace_events(),
    }
    path.write_text(json.dumps(document), "utf-8")
    return path
