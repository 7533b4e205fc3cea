"""A whole session on a GPU: phases, costs, recordings, and nothing left behind."""

import os

import pytest
import torch

from perfdoctor.doors.session import watch
from perfdoctor.record.capture import Phase, WorkKind

pytestmark = pytest.mark.gpu


def train(steps, session=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(64, 256, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_session_records_every_phase_and_changes_no_number():
    expected = train(60)
    before = (torch.cuda.get_sync_debug_mode(), torch._C._cuda_synchronize, torch.Tensor.to)
    with watch(warmup=3, active=6) as session:
        losses = train(60)
    assert losses == expected
    assert before == (torch.cuda.get_sync_debug_mode(), torch._C._cuda_synchronize, torch.Tensor.to)
    capture = session.capture
    assert session.done
    assert len(capture.bare.step_ns) == 6
    assert capture.bare.clock == "cuda-event"
    assert capture.costs.measured
    assert {overhead.phase for overhead in capture.overheads} == {"sites", "light", "full"}
    sites = capture.hits.phase == Phase.SITES
    assert sites.sum() == 6  # one item() a step
    assert (capture.hits.phase == Phase.LIGHT).sum() == 6
    assert (capture.work.kind == WorkKind.KERNEL).sum() > 6 * 12
    assert len(capture.full.ops) > 0
    assert {capture.full.text(name) for name in capture.full.ranges.name} >= {"backward", "optimizer"}
    # The clock of the recording is that of the steps: the light steps' launches lie inside them.
    light = capture.steps.start_ns[-6], capture.steps.end_ns[-1]
    inside = (capture.calls.start_ns >= light[0]) & (capture.calls.start_ns < light[1])
    assert inside.mean() > 0.5


def test_the_users_own_profiler_is_left_alone():
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as mine, watch(warmup=3, active=3) as session:
        train(40)
    assert any("gemm" in event.key.lower() or "kernel" in event.key.lower() for event in mine.key_averages())
    assert any(note.code == "profiler-busy" for note in session.capture.notes)


def test_the_tracer_leaves_and_a_later_recording_is_whole(monkeypatch):
    """After a session CUPTI is detached; sessions behind it, and graphs made before it, work as ever."""
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    x = torch.ones(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    kernels = []
    for _ in range(3):
        with watch(warmup=3, active=6) as session:
            train(60)
        work = session.capture.work
        kernels.append(int((work.kind == WorkKind.KERNEL).sum()))
        assert "TEARDOWN_CUPTI" not in os.environ
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, x * 2)
    assert kernels[0] > 6 * 20
    assert max(kernels) - min(kernels) <= 6
