"""The tracer's leave, where it must not be asked for."""

from __future__ import annotations

import os

import pytest
import torch

from perfdoctor.watch.profile import detach_tracer


@pytest.mark.parametrize("version", [None, "12.4", "11.8"])
def test_before_cuda_12_6_and_without_cuda_the_tracer_stays(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    detach_tracer()  # without CUDA here, the first call of it would raise
    assert "TEARDOWN_CUPTI" not in os.environ


def test_a_setting_of_the_users_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    detach_tracer()
    assert os.environ["TEARDOWN_CUPTI"] == "0"


def test_a_running_profiler_of_the_users_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        detach_tracer()
        assert torch.autograd.profiler._is_profiler_enabled
