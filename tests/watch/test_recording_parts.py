"""The small parts of a recording: patches, overhead, settling, profiler windows, the machine."""

import _thread
import gc
import sys
import threading

import numpy as np
import pytest
import torch

from perfdoctor.record.call_site import HitLog
from perfdoctor.record.load import load_capture
from perfdoctor.watch import surroundings
from perfdoctor.watch.clocks import Stamp, cuda_active, durations, stamp_now
from perfdoctor.watch.garbage import CollectionHook
from perfdoctor.watch.overhead import measure_overhead
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.plan import Plan, Stage
from perfdoctor.watch.profile import ProfileWindow
from perfdoctor.watch.ranges import PhaseRanges
from perfdoctor.watch.settling import Settling


class Base:
    value = 1


class Derived(Base):
    pass


def test_an_inherited_attribute_is_uncovered_again():
    patches = Patches()
    patches.replace(Derived, "value", 2)
    patches.replace(Derived, "value", 3)
    assert (Derived.value, bool(patches)) == (3, True)
    patches.undo()
    patches.undo()
    assert (Derived.value, "value" in vars(Derived), bool(patches)) == (1, False, False)


def test_what_somebody_replaced_meanwhile_is_left():
    patches = Patches()
    patches.replace(Derived, "value", 2)
    Derived.value = 9
    patches.undo()
    assert Derived.value == 9
    del Derived.value


def test_overhead_of_known_steps():
    bare = np.array([100, 100, 100, 100, 500])  # one outlier: medians
    overhead = measure_overhead("sites", bare, np.array([103, 103, 103, 103, 103]))
    assert overhead.ratio == pytest.approx(0.03)
    assert overhead.low <= 0.03 <= overhead.high
    assert measure_overhead("sites", bare, np.array([1, 2])) is None


def test_overhead_draws_no_random_number_of_the_loops():
    np.random.seed(5)
    torch.manual_seed(5)
    expected = (np.random.rand(), torch.rand(1).item())
    np.random.seed(5)
    torch.manual_seed(5)
    measure_overhead("sites", np.arange(1, 9), np.arange(2, 10))
    assert (np.random.rand(), torch.rand(1).item()) == expected


def test_a_loop_settles_after_two_quiet_steps(monkeypatch):
    counters = {"frames": {"total": 0}, "stats": {}}
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", type("M", (), {"counters": counters}))
    settling, seen = Settling(), []
    for compiled in (1, 2, 2, 3, 3, 3, 3):
        counters["frames"]["total"] = compiled
        seen.append(settling.settled())
    assert seen == [False, False, False, False, False, True, True]


def test_the_plan_adds_up():
    plan = Plan(warmup=5, active=10)
    assert plan.total((Stage.WARMUP, Stage.BARE, Stage.SITES)) == 5 + 10 + 11
    assert plan.total(tuple(Stage)) == 5 + 10 + 11 + 12 + 7
    assert Plan(warmup=1, active=2).length(Stage.FULL) == 2


def test_stamps_without_a_gpu_are_host_time():
    assert not cuda_active() or torch.cuda.is_available()
    assert durations([(Stamp(5, None), Stamp(12, None)), (Stamp(0, None), Stamp(1, None))]).tolist() == [7, 1]
    assert stamp_now().ns <= stamp_now().ns


def test_a_window_gives_a_capture_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    window = ProfileWindow(("CPU",))
    assert window.start()
    assert window.running
    torch.ones(4).add(1)
    window.stop()
    capture = window.capture(load_capture)
    assert any(capture.text(name) == "aten::add" for name in capture.ops.name)
    assert list(tmp_path.glob("perfdoctor_*")) == []
    assert window.capture(load_capture) is None


def test_two_windows_at_once_say_why_not():
    first, second = ProfileWindow(("CPU",)), ProfileWindow(("CPU",))
    assert first.start()
    assert not second.start()
    assert "another torch.profiler" in second.problem
    first.stop()
    second.stop()
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_window_that_cannot_be_read_says_so():
    window = ProfileWindow(("CPU",))
    window.start()
    window.stop()

    def load(path):
        raise OSError("no space left")

    assert window.capture(load) is None
    assert window.problem == "the recording could not be read: no space left"


def test_phases_of_updates_with_and_without_a_closure():
    weight = torch.nn.Parameter(torch.ones(2))
    plain, lbfgs = torch.optim.SGD([weight], lr=0.1), torch.optim.LBFGS([weight], max_iter=3)
    ranges = PhaseRanges()
    ranges.install()
    try:
        weight.sum().backward()  # idle
        ranges.begin()
        weight.sum().backward()
        plain.step()

        def closure():
            loss = weight.square().sum()
            loss.backward()
            return loss

        lbfgs.step(closure)
        ranges.end()
        plain.step()
    finally:
        ranges.remove()
    names = [row.name for row in ranges.rows]
    assert names[:2] == ["backward", "optimizer"]
    assert names[-1] == "closure"
    assert set(names[2:-1]) == {"backward"}


def test_automatic_collections_are_no_hits():
    log, pauses = HitLog(), []
    hook = CollectionHook(log, pauses)
    hook.install()
    hook.install()
    try:
        keep = [[] for _ in range(5000)]
        gc.collect()
        gc.collect(0)
    finally:
        hook.remove()
    assert len(keep) == 5000
    assert hook._collected not in gc.callbacks
    assert [hit.kind for hit in log.hits] == ["python_gc"]
    assert [pause.name for pause in pauses][-2:] == ["gc:2", "gc:0"]
    assert len(pauses) > 2


def test_a_collection_outside_of_any_frame_is_a_pause_only():
    log, pauses = HitLog(), []
    hook = CollectionHook(log, pauses)
    # The first function of a thread has no frame below it, as where C code or the end of Python collects.
    for phase in ("start", "stop"):
        done = threading.Event()
        _thread.start_new_thread(hook._collected, (phase, Told(done)))
        assert done.wait(10)
    assert [pause.name for pause in pauses] == ["gc:2"]
    assert log.hits == []


class Told(dict):
    """Details of a full collection; says when the hook is done with them."""

    def __init__(self, done):
        super().__init__(generation=2, collected=0)
        self.done = done

    def __del__(self):
        self.done.set()


def test_processors_are_those_of_the_control_group(monkeypatch, tmp_path):
    monkeypatch.setattr(surroundings.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    real = surroundings.Path
    monkeypatch.setattr(surroundings, "Path", lambda name: real(str(tmp_path) + name))
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    assert surroundings.usable_cpus() == 4
    (group / "cpu.max").write_text("150000 100000\n")
    assert surroundings.usable_cpus() == 1.5
    (group / "cpu.max").write_text("max 100000\n")
    assert surroundings.usable_cpus() == 4
    (group / "cpu.max").unlink()
    (group / "cpu").mkdir()
    (group / "cpu/cpu.cfs_quota_us").write_text("50000\n")
    (group / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert surroundings.usable_cpus() == 0.5


def test_the_environment_names_ranks_and_keeps_no_variable(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    loader = torch.utils.data.DataLoader([1], num_workers=2, prefetch_factor=4)
    environment = surroundings.read_environment(loader, [], 0)
    assert (environment.rank, environment.world_size) == (3, 8)
    assert (environment.num_workers, environment.prefetch_factor, environment.pin_memory) == (2, 4, False)
    assert environment.fused_optimizer is None
    assert "hunter2" not in repr(environment)


def test_optimizers_are_described():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = torch.optim.AdamW([{"params": [weight]} for weight in weights], foreach=False)
    (note,) = surroundings.describe_optimizers([optimizer])
    assert note.count == 3
    assert note.text.startswith("AdamW: 3 parameter groups, 3 tensors, fused=None, foreach=False")
