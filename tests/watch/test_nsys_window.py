"""The window that nsys records: opened and closed once, never beside a torch.profiler."""

import pytest
import torch
from torch.autograd.profiler import profile

from perfdoctor.doors.nsys_script import expand
from perfdoctor.watch import nsys_window
from perfdoctor.watch.nsys_window import NsysWindow


class Cudart:
    """Stands where there is no GPU for the two calls that nsys waits for."""

    def __init__(self):
        self.calls = []

    def cudaProfilerStart(self):
        self.calls.append("start")

    def cudaProfilerStop(self):
        self.calls.append("stop")


@pytest.fixture
def cudart(monkeypatch):
    made = Cudart()
    times = iter((7_000.0, 10_500.0))
    monkeypatch.setattr(nsys_window, "cuda_active", lambda: True)
    monkeypatch.setattr(nsys_window, "_cudart", lambda: made)
    monkeypatch.setattr(nsys_window, "launch_cost", lambda: next(times))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.calls.append("synchronize"))
    return made


def test_opened_and_closed_once(cudart):
    before = profile._prepare_trace
    window = NsysWindow()
    window.measure_costs()
    assert window.start()
    window.stop()
    window.stop()
    assert cudart.calls == ["start", "synchronize", "stop"]
    assert (window.costs.call_ns, window.costs.measured) == (3_500, True)
    assert profile._prepare_trace is before


def test_a_torch_profiler_that_runs_already(cudart):
    window = NsysWindow()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not window.start()
    assert "torch.profiler runs in the loop" in window.problem
    assert "CUPTI" in window.problem
    window.stop()
    assert cudart.calls == []


def test_a_torch_profiler_that_starts_meanwhile(cudart):
    window = NsysWindow()
    assert window.start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass
    assert "started a torch.profiler" in window.problem
    window.stop()
    assert cudart.calls == ["start", "synchronize", "stop"]


def test_without_cuda():
    window = NsysWindow()
    assert not window.start()
    assert window.problem == "the loop does not use CUDA"
    window.stop()


def test_an_error_of_the_device_does_not_hide_the_loops(cudart, monkeypatch):
    def broken():
        raise RuntimeError("device-side assert")

    window = NsysWindow()
    window.start()
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    window.stop()
    assert "device-side assert" in window.problem


def test_names_of_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert expand("out/run_%q{RANK}.sites.json") == "out/run_3.sites.json"
    assert expand("run.sites.json") == "run.sites.json"
