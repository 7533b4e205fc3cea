"""Diagnoses made by hand, for the renderers."""

from __future__ import annotations

import pytest

from perfdoctor.diagnose.finding import (
    Accounting,
    Advice,
    Binding,
    Diagnosis,
    Finding,
    Headroom,
    RankRow,
    Severity,
    Skipped,
    StepTime,
)
from perfdoctor.record.capture import Environment, Frame, Note, Overhead, Site

MS = 1_000_000


def make_site(line: int, text: str, file: str = "/home/ann/run/train.py", **more: object) -> Site:
    return Site(frame=Frame(file=file, line=line, function="main"), text=text, **more)  # type: ignore[arg-type]


@pytest.fixture
def diagnosis() -> Diagnosis:
    """A loop of 25.2 ms with one dear read, a copy, two cheap findings and one to leave alone; the parts add up."""
    read = Finding(
        code="host-sync",
        severity=Severity.COST,
        title="reads a device value",
        kind="item",
        site=make_site(84, "running_loss += loss.item()"),
        count=4,
        count_per_micro_batch=1,
        host_blocked_ns=round(12.3 * MS),
        gpu_idle_ns=round(5.6 * MS),
        headroom=Headroom(low_ns=round(4.9 * MS), mid_ns=round(5.4 * MS), high_ns=6 * MS),
        afterwards="prepared the next batch for 5.2 ms before it launched anything",
        basis="replay of the CUDA-only recording, 10 steps",
        advice=Advice(
            text="Sum detached tensors on the device and read the sum every N steps.",
            lines=("running_loss += loss.detach()", "if step % 50 == 0:", "    print(running_loss.item() / 50)"),
        ),
        treatments=("device_metrics",),
        evidence=((1_700_000_000_000_000_000, 1_700_000_000_012_300_000),),
    )
    copy = Finding(
        code="pageable-copy",
        severity=Severity.COST,
        title="copies from pageable host memory",
        kind="h2d_pageable",
        site=make_site(61, "x, y = x.to(device), y.to(device)"),
        count=2,
        host_blocked_ns=round(1.4 * MS),
        gpu_idle_ns=round(1.2 * MS),
        headroom=Headroom(low_ns=1 * MS, mid_ns=round(1.3 * MS), high_ns=round(1.5 * MS)),
        basis="replay of the CUDA-only recording, 10 steps",
        advice=Advice(
            text="Pin the source and copy without blocking.", lines=("loader = DataLoader(..., pin_memory=True)",)
        ),
    )
    launch = Finding(code="launch-bound", severity=Severity.COST, title="launches many short kernels", count=1)
    mask = Finding(
        code="host-sync",
        severity=Severity.COST,
        title="indexes with a device mask, whose size the host must read",
        site=make_site(90, "loss = F.cross_entropy(logits[mask], targets[mask])"),
        headroom=Headroom(low_ns=0, mid_ns=round(0.6 * MS), high_ns=1 * MS),
        advice=Advice(text="Use ignore_index, or multiply by the mask."),
    )
    leave = Finding(
        code="host-sync",
        severity=Severity.MINOR,
        title="reads a device value",
        site=make_site(102, "log(norm.item())"),
        count=0.1,
    )
    return Diagnosis(
        source="train.py, 10 steps",
        step=StepTime(
            median_ns=round(25.2 * MS),
            low_ns=round(24.9 * MS),
            high_ns=round(25.8 * MS),
            num_steps=10,
            basis="bare steps by CUDA events",
        ),
        accounting=Accounting(
            window_ns=25 * MS,
            busy_ns=16 * MS,
            idle_by_code={"pageable-copy": 1 * MS, "host-sync": 6 * MS},
            unexplained_ns=2 * MS,
            matrix_ns=9 * MS,
            bandwidth_ns=4 * MS,
            copy_ns=1 * MS,
            run_ahead_ns=900_000,
        ),
        binding=Binding.HOST_SYNC,
        findings=(read, copy, launch, mask),
        leave_alone=(leave,),
        skipped=(Skipped(check="data-wait", why="the window is shorter than the loader's buffer of 8 batches"),),
        steps_per_s=39.7,
        samples_per_s=1270.4,
        micro_batches=4,
        environment=Environment(
            gpu="NVIDIA H200",
            num_gpus=1,
            torch="2.11.0",
            cuda="13.0",
            peak_memory_bytes=31_200_000_000,
            memory_bytes=150_000_000_000,
        ),
        notes=(Note(code="clipped", text="the first step's first kernels were not recorded"),),
        overheads=(Overhead(phase="sites", ratio=0.012, low=0.004, high=0.021),),
    )


@pytest.fixture
def rank_rows() -> tuple[RankRow, ...]:
    return (
        RankRow(rank=0, path="r0.json", step_ns=25 * MS, busy_ratio=0.64, exposed_communication_ns=3 * MS),
        RankRow(rank=1, path="r1.json", step_ns=31 * MS, busy_ratio=0.9, exposed_communication_ns=0, note="slowest"),
    )
