"""Trials of real loops on a GPU: the right arm, a cost that is plain found, nothing claimed where nothing is.

How close the figures come is `scripts/bench predictions`: a machine that runs other tests beside this one is no clock.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import perfdoctor
from perfdoctor.trial.outcome import ArmResult, TrialOutcome

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def big_model(width: int = 4096, depth: int = 12) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]).to(DEVICE)


def small_model() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(40)]).to(DEVICE)


def busy_host(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def trial_of(step: Callable[[], Any], seconds: float = 25.0) -> TrialOutcome:
    with perfdoctor.watch() as session:
        trial = session.trial(seconds=seconds)
        for _ in range(100_000):
            step()
            if trial.over:
                break
    return trial.outcome()


def arm_of(outcome: TrialOutcome, code: str) -> ArmResult:
    arms = [arm for arm in outcome.arms if arm.finding is not None and arm.finding.code == code and arm.prediction]
    assert arms, ([arm.text for arm in outcome.arms], [(row.finding.code, row.why) for row in outcome.refused])
    return arms[0]


def test_a_read_before_slow_host_work_in_a_gpu_bound_loop() -> None:
    model = big_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True)
    x = torch.randn(1024, 4096, device=DEVICE)
    values = []

    def step() -> None:
        busy_host(0.008)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())

    arm = arm_of(trial_of(step), "host-sync")
    # The whole 8 ms of host work hide behind the device without the read; beside other tests the interval may be wide.
    assert arm.saving.median_ns > 4e6


def test_a_read_in_a_host_bound_loop_gives_nothing_back() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True)
    x = torch.randn(16, 64, device=DEVICE)
    values = []

    def step() -> None:
        busy_host(0.004)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())

    outcome = trial_of(step)
    rows = [arm for arm in outcome.arms if arm.finding is not None and arm.finding.code == "host-sync"]
    for arm in rows:
        assert not arm.saving.significant or abs(arm.saving.median_ns) < 0.05 * outcome.base_ns


def test_pageable_copies_against_pinned_ones() -> None:
    model = big_model(2048, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True)
    pool = [torch.randn(4096, 2048) for _ in range(3)]
    turn = [0]

    def step() -> None:
        turn[0] += 1
        x = pool[turn[0] % 3].to(DEVICE)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    arm = arm_of(trial_of(step), "pageable-copy")
    assert arm.mode == "pinned"
    assert arm.saving.low_ns > 0


def test_a_single_tensor_optimizer_against_the_fused_one() -> None:
    model = small_model()
    x = torch.randn(16, 64, device=DEVICE)
    single = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        single.step()
        single.zero_grad()

    outcome = trial_of(step)
    arm = arm_of(outcome, "gradient-loop")
    assert arm.mode == "fused"
    assert all(not state["step"].is_cuda for state in single.state.values())
    assert arm.saving.low_ns > 0


def test_a_norm_loop_against_the_multi_tensor_norm() -> None:
    model = small_model()
    x = torch.randn(16, 64, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    norms: list[Any] = []

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        norms.append(sum(p.grad.norm().item() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5)
        optimizer.step()
        optimizer.zero_grad()

    arm = arm_of(trial_of(step), "gradient-loop")
    assert arm.mode == "multi-tensor"
    assert arm.saving.low_ns > 0


def test_no_wait_is_added_to_the_steps() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    x = torch.randn(16, 64, device=DEVICE)
    values = []
    with perfdoctor.watch() as session:
        trial = session.trial(seconds=10)
        for _ in range(100_000):
            with perfdoctor.sync_guard(budget=0) if trial.running else nullcontext():
                loss = model(x).square().mean()
                loss.backward()
            optimizer.step()  # phases and blocks change in here, and the profiler waits
            optimizer.zero_grad()
            values.append(loss.item())
            if trial.over:
                break
    assert trial.outcome().arms
