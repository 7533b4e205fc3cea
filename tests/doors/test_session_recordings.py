"""What a session records of a real loop on the CPU beside its steps: pauses, hits, profiles; what is made of it."""

import gc
import os
import subprocess
import sys

import pytest
import torch
from session_loops import Loop

from perfdoctor.diagnose import diagnose
from perfdoctor.doors.session import watch
from perfdoctor.emulate import emulate_cuda
from perfdoctor.record.call_site import HitLog
from perfdoctor.report.phrases import promise
from perfdoctor.watch import recorder as recorder_module
from perfdoctor.watch.plan import Stage
from perfdoctor.watch.profile import ProfileWindow

pytestmark = pytest.mark.usefixtures("settled")


def test_collections_are_pauses_and_calls_of_collect_are_hits():
    loop = Loop()
    with watch(warmup=1, active=2) as session:
        for batch in session.batches(loop.loader):
            loop.step(batch)
            loop.update()
            gc.collect()
    capture = session.capture
    assert [capture.text(kind) for kind in capture.hits.kind] == ["python_gc"] * 2
    assert capture.sites[int(capture.hits.site[0])].text == "gc.collect()"
    assert (capture.hits.end_ns > capture.hits.start_ns).all()
    assert [capture.text(name) for name in capture.pauses.name].count("gc:2") >= 2


def test_hits_of_an_emulated_device_feed_the_session():
    loop, log = Loop(), HitLog()
    with watch(warmup=1, active=2, hits=log) as session:
        for batch in session.batches(loop.loader):
            loop.step(batch)
            loop.update()
            log.add("item", sys._getframe(), *[recorder_module.now()] * 2)
    capture = session.capture
    assert len(log.hits) == 16
    assert [capture.text(kind) for kind in capture.hits.kind] == ["item", "item"]


@pytest.mark.parametrize("given", [True, False])
def test_a_session_inside_an_emulated_device_hears_it(given):
    with emulate_cuda() as device:
        weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        with watch(warmup=1, active=3, hits=device.log if given else None) as session:
            for _ in session.batches(range(8)):
                optimizer.zero_grad()
                loss = weight.sum()
                loss.backward()
                optimizer.step()
                loss.detach().item()
        heard = len(session.recorder.log.hits)
        weight.sum().detach().item()
        assert len(session.recorder.log.hits) == heard + given
    capture = session.capture
    assert [capture.text(kind) for kind in capture.hits.kind] == ["item"] * 3
    assert capture.sites[int(capture.hits.site[0])].text == "loss.detach().item()"
    assert "no-gpu" not in [note.code for note in capture.notes]


@pytest.mark.parametrize(("device", "is_said"), [("cpu", True), ("cuda", False)])
def test_a_loop_that_leaves_the_emulated_device_alone_is_told_so(device, is_said):
    with emulate_cuda():
        torch.ones(2, device="cuda").sum()  # set-up
        weight = torch.nn.Parameter(torch.ones(2, device=device))
        optimizer = torch.optim.SGD([{"params": []}, {"params": [weight]}], lr=0.1)  # nothing without weight decay
        with watch(warmup=1, active=3) as session:
            for _ in session.batches(range(8)):
                optimizer.zero_grad()
                weight.sum().backward()
                optimizer.step()
    notes = {note.code: note.text for note in session.capture.notes}
    assert ("no-gpu" in notes) is is_said
    said = "The loop ran on the CPU: what waits for a GPU could not be seen"
    assert (promise(diagnose(session.capture)).startswith(said)) is is_said
    if is_said:
        assert "though a device is there; the parameters of SGD are on the CPU (model.to('cuda'), or" in notes["no-gpu"]
        assert "Lines and counts are those of a GPU" not in notes["emulated-device"]


def test_a_generator_is_closed_when_the_loop_breaks_out_of_it():
    closed = []

    def stream():
        try:
            yield from range(100)
        finally:
            closed.append(True)

    with watch(warmup=1, active=2) as session:
        for index in session.batches(stream()):
            if index == 3:
                break
        gc.collect()
        assert closed == [True]


def test_profiled_phases_are_recorded_and_joined_by_time():
    loop = Loop(rows=200)
    session = watch(warmup=1, active=3, profiled=True)
    session.recorder.windows = {stage: ProfileWindow(("CPU",)) for stage in session.recorder.windows}
    with session:
        loop.run(session.batches(loop.loader))
    capture = session.capture
    assert session.recorder.costs.measured is False
    full = capture.full
    assert full is not None
    assert len(full.steps) == 3
    names = [full.text(name) for name in full.ops.name]
    assert names.count("aten::mse_loss") == 0
    assert sum(name == "aten::addmm" for name in names) >= 6  # two layers, three steps
    inside = (full.ops.start_ns >= full.steps.start_ns[0]) & (full.ops.start_ns < full.steps.end_ns[-1])
    assert inside.sum() > 0.4 * len(inside)
    assert {overhead.phase for overhead in capture.overheads} == {"sites", "light", "full"}


def test_a_profiler_of_the_users_comes_first():
    loop = Loop(rows=200)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    session = watch(warmup=1, active=3, profiled=True)
    session.recorder.windows = {stage: ProfileWindow(("CPU",)) for stage in session.recorder.windows}
    with torch.profiler.profile(activities=cpu) as mine, session:
        loop.run(session.batches(loop.loader))
    assert any(event.key == "aten::addmm" for event in mine.key_averages())
    assert [note.code for note in session.capture.notes].count("profiler-busy") == 2
    assert session.capture.bare is not None
    assert len(session.capture.steps) == 6


def test_a_profiler_that_the_loop_starts_during_ours_ends_ours():
    loop = Loop(rows=200)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    session = watch(warmup=1, active=3, profiled=True)
    session.recorder.windows = {stage: ProfileWindow(("CPU",)) for stage in session.recorder.windows}
    with session:
        for batch in session.batches(loop.loader):
            if session.recorder.stage == Stage.LIGHT:
                with torch.profiler.profile(activities=cpu) as mine:
                    loop.step(batch)
            else:
                loop.step(batch)
            loop.update()
    assert any(event.key == "aten::addmm" for event in mine.key_averages())
    assert any("profiler of its own" in note.text for note in session.capture.notes)


def test_diagnosis_of_a_session():
    loop = Loop(rows=200)
    with watch(warmup=1, active=3) as session:
        loop.run(session.batches(loop.loader))
    assert session.diagnosis().step.num_steps == 3


def test_a_capture_of_a_session_can_be_kept(tmp_path):
    from perfdoctor.record.load import load_capture

    loop = Loop()
    with watch(warmup=1, active=2) as session:
        loop.run(session.batches(loop.loader))
    session.capture.save(tmp_path / "loop.perfdoctor")
    again = load_capture(tmp_path / "loop.perfdoctor")
    assert again.steps.index.tolist() == session.capture.steps.index.tolist()
    assert again.bare.step_ns.tolist() == session.capture.bare.step_ns.tolist()


def test_warnings_as_errors_do_not_end_the_loop(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(
        "import ctypes, torch\n"
        "from perfdoctor.watch import recorder as r\n"
        "from perfdoctor.doors.session import watch\n"
        "r.cuda_active = lambda: True\n"
        "warn = ctypes.pythonapi.PyErr_WarnEx\n"
        "warn.argtypes = [ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t]\n"
        "weight = torch.nn.Parameter(torch.ones(2)); weight.grad = torch.ones(2)\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "with watch(warmup=2, active=4, profiled=False) as session:\n"
        "    for _ in range(20):\n"
        "        optimizer.step()\n"
        "        if session.recorder.hooks._warning: warn(UserWarning, b'called a synchronizing CUDA operation', 1)\n"
        "        if session.done: break\n"
        "print(len(session.capture.hits))\n"
    )
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert done.stderr == ""
    assert done.stdout == "4\n"
