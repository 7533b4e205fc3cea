"""A session around real loops on the CPU: what it records, what it changes (nothing), how it ends."""

import ctypes
import gc
import sys
import threading
import warnings

import pytest
import torch
from session_loops import Loop

from perfdoctor.doors.session import watch
from perfdoctor.errors import SessionError
from perfdoctor.record.capture import Costs, Phase
from perfdoctor.watch import calibration
from perfdoctor.watch import recorder as recorder_module
from perfdoctor.watch.plan import Stage
from perfdoctor.watch.profile import ProfileWindow

pytestmark = pytest.mark.usefixtures("settled")
_warn = ctypes.pythonapi.PyErr_WarnEx
_warn.argtypes = [ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t]


def sync(session):
    """What torch's C++ does at a sync in the mode "warn", which is on while the hooks are."""
    if session.recorder.hooks._warning:
        _warn(UserWarning, b"called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)", 1)


@pytest.fixture
def hooked(monkeypatch):
    """The live hooks as on a GPU, without one: syncs are those of `sync`."""
    monkeypatch.setattr(recorder_module, "cuda_active", lambda: True)


def state():
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    tensor = {name: vars(torch.Tensor).get(name) for name in ("to", "cuda", "copy_", "item", "__float__", "numpy")}
    return {
        "filters": (id(warnings.filters), list(warnings.filters), warnings.showwarning),
        "gc": list(gc.callbacks),
        "hooks": (dict(optimizer._global_optimizer_pre_hooks), dict(optimizer._global_optimizer_post_hooks)),
        "tensor": tensor,
        "torch": (GradScaler.update, torch.autograd.backward, torch.cuda.Event.synchronize, torch.cuda.Event.query),
        "profiler": torch.autograd.profiler.profile._prepare_trace,
        "cuda": (torch.cuda.synchronize, torch.cuda.empty_cache, vars(torch._C).get("_cuda_synchronize")),
        "loader": (dataloader._BaseDataLoaderIter.__next__, dataloader._MultiProcessingDataLoaderIter.__init__),
        "python": (sys.excepthook, threading.excepthook, sys.argv, sys.gettrace(), sys.getprofile()),
        "threads": threading.active_count(),
    }


def test_phases_in_order_and_steps_by_the_loops_own_count():
    loop = Loop(rows=200)
    with watch(warmup=2, active=4) as session:
        loop.run(session.batches(loop.loader))
    rows = session.recorder.rows
    stages = [row.stage for row in rows]
    assert stages == [Stage.WARMUP] * 2 + [Stage.BARE] * 4 + [Stage.SITES] * 5
    assert session.done
    capture = session.capture
    assert capture.source == "session"
    assert capture.steps.index.tolist() == [7, 8, 9, 10]  # one settling step after the hooks went in
    assert capture.steps.samples.tolist() == [4] * 4
    assert capture.steps.micro_batches.tolist() == [1] * 4
    assert len(capture.bare.step_ns) == 4
    assert capture.bare.clock == "host"
    assert (capture.bare.data_ns > 0).all()
    assert (capture.bare.data_ns < capture.bare.step_ns).all()
    assert [overhead.phase for overhead in capture.overheads] == ["sites"]
    assert capture.environment.num_workers == 0
    assert capture.environment.fused_optimizer is False
    assert {note.code for note in capture.notes} == {"no-gpu", "optimizer"}


@pytest.mark.parametrize("workers", [0, 1])
def test_losses_are_the_same_with_and_without(workers, hooked):
    bare = Loop(rows=200, workers=workers)
    expected = [bare.run(bare.loader) for _ in range(2)]
    loop = Loop(rows=200, workers=workers)
    with watch(warmup=2, active=4, profiled=False) as session:
        losses = [loop.run(session.batches(loop.loader)) for _ in range(2)]
    assert losses == expected
    assert torch.equal(torch.rand(3), torch.rand(3)) is False
    assert session.capture.bare is not None


class Interrupt(Exception):
    pass


def leave_by(way, session, loop):
    if way == "end":
        loop.run(session.batches(loop.loader))
    elif way == "break":
        for number, batch in enumerate(session.batches(loop.loader)):
            loop.step(batch)
            loop.update()
            if number == 6:
                break
    else:
        for number, batch in enumerate(session.batches(loop.loader)):
            loop.step(batch)
            if number == 6:
                raise {"error": Interrupt("bad batch 6"), "interrupt": KeyboardInterrupt()}[way]
            loop.update()


@pytest.mark.parametrize("way", ["end", "break", "error", "interrupt"])
@pytest.mark.parametrize("profiled", [False, True])
def test_everything_is_as_it_was_on_every_way_out(way, profiled, hooked, monkeypatch):
    monkeypatch.setattr(calibration, "measure_costs", lambda: Costs())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    loop = Loop(rows=200)
    before = state()
    session = watch(warmup=1, active=3, profiled=profiled)
    session.recorder.windows = {stage: ProfileWindow(("CPU",)) for stage in session.recorder.windows}
    expected = {"error": Interrupt, "interrupt": KeyboardInterrupt}.get(way)
    if expected:
        with pytest.raises(expected) as raised, session:
            leave_by(way, session, loop)
        assert str(raised.value) == ("bad batch 6" if way == "error" else "")
    else:
        with session:
            leave_by(way, session, loop)
    assert state() == before
    assert len(session.capture.bare.step_ns) == 3
    assert state() == before
    if expected:
        assert session.capture.steps.complete.tolist()[-1] == 0
        assert any(note.code == "stopped-early" for note in session.capture.notes)


def test_a_second_session_at_once_is_refused_and_the_first_goes_on():
    loop = Loop()
    with watch(warmup=1, active=2) as session:
        with pytest.raises(SessionError, match="another perfdoctor session"), watch():
            pass
        loop.run(session.batches(loop.loader))
    assert session.done
    with pytest.raises(SessionError, match="has been used"):
        session.__enter__()


def test_out_of_order_use_is_said():
    session = watch()
    with pytest.raises(SessionError, match="inside"):
        session.batches([])
    with pytest.raises(SessionError, match="inside"):
        session.step()
    with pytest.raises(SessionError, match="after"):
        _ = session.capture
    with pytest.raises(SessionError, match="at least one step"):
        watch(active=0)


def test_runs_are_independent(hooked):
    for _ in range(3):
        loop = Loop()
        with watch(warmup=1, active=3, profiled=False) as session:
            for batch in session.batches(loop.loader):
                loop.step(batch)
                loop.update()
                sync(session)
        capture = session.capture
        assert capture.steps.index.tolist() == [5, 6, 7]
        assert len(capture.hits) == 3


def test_a_full_count_whatever_the_loop_does_to_warnings(hooked):
    loop = Loop(rows=200)
    mine = []
    with watch(warmup=2, active=6, profiled=False) as session, warnings.catch_warnings():
        warnings.showwarning = lambda message, *rest, **more: mine.append(str(message))
        warnings.simplefilter("always")
        for number, batch in enumerate(session.batches(loop.loader)):
            loop.step(batch)
            loop.update()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                sync(session)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                sync(session)
            warnings.warn(f"step {number}", stacklevel=1)
    assert sum("step" in text for text in mine) == 50
    hits = session.capture.hits
    assert (hits.phase == Phase.SITES).all()
    assert len(hits) == 12
    assert [hits.step.tolist().count(step) for step in range(6)] == [2] * 6


def test_accumulation_counts_micro_batches_and_updates():
    loop = Loop(rows=4 * 4 * 12)
    with watch(warmup=1, active=3) as session:
        for number, batch in enumerate(session.batches(loop.loader), 1):
            loop.step(batch, accumulate=4)
            if number % 4 == 0:
                loop.update()
    assert session.capture.steps.micro_batches.tolist() == [4, 4, 4]
    assert session.capture.steps.samples.tolist() == [16, 16, 16]


def test_micro_batches_from_backward_passes_where_no_loader_is_seen():
    loop = Loop()
    batch = next(iter(loop.loader))
    with watch(warmup=1, active=3) as session:
        for number in range(1, 25):
            loop.step(batch, accumulate=2)
            if number % 2 == 0:
                loop.update()
    assert session.capture.steps.micro_batches.tolist() == [2, 2, 2]
    names = {session.capture.text(name) for name in session.capture.ranges.name}
    assert names == {"backward", "optimizer"}


def test_a_generator_is_taken_from_one_by_one():
    loop = Loop()
    made = []

    def stream():
        while True:
            made.append(1)
            yield torch.randn(4, 4), torch.randn(4, 1)

    with watch(warmup=1, active=2) as session:
        source = session.batches(stream())
        with pytest.raises(TypeError, match="len"):
            len(source)
        for _ in range(7):
            loop.step(next(source))
            loop.update()
    assert len(made) == 7
    assert session.capture.bare.data_ns.tolist()
    with pytest.raises(StopIteration), watch(warmup=1) as session:
        next(session.batches(iter([])))


def test_batches_have_the_loaders_length_and_can_be_iterated_again():
    loop = Loop(rows=16)
    with watch(warmup=1, active=2) as session:
        batches = session.batches(loop.loader)
        assert len(batches) == 4
        assert batches
        assert [len(list(batches)), len(list(batches))] == [4, 4]


def test_the_short_batch_is_marked():
    loop = Loop(rows=4 * 4 + 1)
    with watch(warmup=1, active=5) as session:
        for _ in range(3):
            loop.run(session.batches(loop.loader))
    steps = session.capture.steps
    assert steps.samples.tolist() == [1 if index % 5 == 4 else 4 for index in steps.index.tolist()]
    assert steps.partial.tolist() == [int(samples == 1) for samples in steps.samples.tolist()]
    assert 1 in steps.partial.tolist()


def test_evaluation_inside_training_is_told_apart():
    loop = Loop(rows=200)
    with watch(warmup=1, active=4) as session:
        for batch in session.batches(loop.loader):
            loop.step(batch)
            loop.update()
            with torch.no_grad():
                for _ in session.batches([batch, batch]):
                    pass
    capture = session.capture
    names = [capture.text(name) for name in capture.pauses.name]
    assert names.count("data") == 4
    assert names.count("eval-data") == 8
    assert capture.steps.micro_batches.tolist() == [1] * 4


def test_a_loop_shorter_than_the_plan_still_says_what_it_saw(hooked):
    loop = Loop(rows=4 * 6)
    with watch(warmup=5, active=10, profiled=False) as session:
        for batch in session.batches(loop.loader):
            loop.step(batch)
            loop.update()
            sync(session)
    capture = session.capture
    note = next(note for note in capture.notes if note.code == "stopped-early")
    assert note.text == "only 6 of 26 planned steps were seen"
    # Steps 1 to 4 of the warm-up; the first one is set-up. The read after an update belongs to the next step.
    assert capture.steps.index.tolist() == [1, 2, 3, 4]
    assert [capture.hits.step.tolist().count(step) for step in range(4)] == [1, 1, 1, 1]


def test_marks_by_hand_for_updates_that_no_optimizer_makes():
    weight = torch.zeros(2)
    with watch(warmup=1, active=2) as session:
        for _ in range(8):
            weight += 1
            session.step()
    assert session.capture.steps.index.tolist() == [4, 5]
    assert any(note.code == "step-source" for note in session.capture.notes)


def test_no_step_at_all_is_said():
    with watch() as session:
        pass
    assert session.capture.notes[0].code == "no-steps"
    assert session.capture.bare is None
