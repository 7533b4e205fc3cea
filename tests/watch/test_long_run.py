"""A long run on its cheap clock: every step timed, rare things seen, outliers billed, windows opened and closed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import perfdoctor
from perfdoctor.doors.long_session import LongRun
from perfdoctor.errors import UsageError
from perfdoctor.record.capture import Frame, Site
from perfdoctor.watch import happenings as kinds
from perfdoctor.watch import long_run
from perfdoctor.watch.happenings import Happening, Happenings
from perfdoctor.watch.long_run import LongClock, StepClock
from perfdoctor.watch.outliers import bill, find_outliers, summarise
from perfdoctor.watch.plan import Plan

MS = 1_000_000
SAVE = Site(frame=Frame(file="train.py", line=40, function="main"))

# ---- the clock ----


class FakeEvent:
    """A CUDA event whose time and arrival are known."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.at_ns: int | None = None
        self.num_records = 0

    def record(self) -> None:
        self.at_ns = self._device.work_ns
        self.num_records += 1

    def query(self) -> bool:
        return self.at_ns is not None and self.at_ns <= self._device.done_ns

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.query(), "read before it was complete: that waits for the device"
        assert later.query(), "read before it was complete: that waits for the device"
        assert self.at_ns is not None
        assert later.at_ns is not None
        return (later.at_ns - self.at_ns) / 1e6


class FakeDevice:
    """Work ends at `work_ns` once it is launched; the device has come as far as `done_ns`."""

    def __init__(self) -> None:
        self.work_ns = self.done_ns = 0
        self.events: list[FakeEvent] = []

    def event(self, **_: Any) -> FakeEvent:
        self.events.append(FakeEvent(self))
        return self.events[-1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    found = FakeDevice()
    monkeypatch.setattr(long_run, "cuda_active", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    return found


def test_device_durations_are_those_between_events(device: FakeDevice) -> None:
    clock = StepClock()
    lengths = [(5 + step % 7) * MS for step in range(200)]
    for length in lengths:
        device.work_ns += length
        device.done_ns = max(device.work_ns - 40 * MS, 0)  # the host runs 4 to 8 steps ahead
        clock.ended(clock.stamp())
    device.done_ns = device.work_ns
    assert clock.durations().tolist() == lengths[1:]
    assert len(device.events) < 80  # the ring turns: one event a step would be 200


def test_a_stamp_that_ends_no_step_is_recorded_over(device: FakeDevice) -> None:
    clock = StepClock()
    for _ in range(3):
        device.work_ns += MS
        clock.stamp()  # a second optimizer of the same step
        device.work_ns += MS
        clock.ended(clock.stamp())
    device.done_ns = device.work_ns
    assert clock.durations().tolist() == [2 * MS, 2 * MS]


def test_a_device_that_never_comes_back_leaves_host_times(device: FakeDevice) -> None:
    clock = StepClock()
    for _ in range(1500):
        device.work_ns += MS
        clock.ended(clock.stamp())
    assert len(device.events) == 1024
    assert clock.num_steps == 1500
    assert (clock.durations() == np.diff(clock.end_ns)).all()


def test_without_cuda_the_host_is_the_clock() -> None:
    clock = StepClock()
    for _ in range(5):
        clock.ended(clock.stamp())
    assert (clock.durations() == np.diff(clock.end_ns)).all()
    assert clock.num_steps == 5


# ---- bills, by hand ----


def test_a_bill_takes_each_nanosecond_once() -> None:
    rows = [
        Happening(kinds.EVALUATION, 10 * MS, 60 * MS),
        Happening(kinds.COLLECTION, 20 * MS, 25 * MS),
        Happening(kinds.CHECKPOINT, 50 * MS, 58 * MS, SAVE),
    ]
    bills = bill(70 * MS, rows, (0, 100 * MS), 0)
    assert [(each.cause, each.ns) for each in bills] == [
        (kinds.EVALUATION, 37 * MS),
        (kinds.UNKNOWN, 20 * MS),
        (kinds.CHECKPOINT, 8 * MS),
        (kinds.COLLECTION, 5 * MS),
    ]
    assert bills[2].site == SAVE


def test_what_nobody_timed_takes_what_is_left() -> None:
    rows = [Happening(kinds.RECOMPILATION, 99, 99), Happening(kinds.COLLECTION, 10, 30)]
    assert [(each.cause, each.ns) for each in bill(100, rows, (0, 100), 0)] == [
        (kinds.RECOMPILATION, 80),
        (kinds.COLLECTION, 20),
    ]


def test_a_slow_batch_is_a_data_wait_and_a_first_batch_an_epochs() -> None:
    assert [tuple(each[:2]) for each in bill(50, [], (0, 100), 45)] == [(kinds.DATA_WAIT, 45), (kinds.UNKNOWN, 5)]
    first = [Happening(kinds.EPOCH_END, 10, 60)]
    assert [tuple(each[:2]) for each in bill(50, first, (0, 100), 45)] == [(kinds.EPOCH_END, 50)]


@given(
    excess=st.integers(1, 1000),
    waited=st.integers(0, 1000),
    rows=st.lists(
        st.builds(
            lambda cause, start, length: Happening(cause, start, start + length),
            st.sampled_from(
                [kinds.CHECKPOINT, kinds.EVALUATION, kinds.COLLECTION, kinds.EPOCH_END, kinds.RECOMPILATION]
            ),
            st.integers(0, 900),
            st.integers(0, 500),
        ),
        max_size=8,
    ),
)
def test_a_bill_adds_up_to_the_excess(excess: int, waited: int, rows: list[Happening]) -> None:
    bills = bill(excess, rows, (0, 1000), waited)
    assert sum(each.ns for each in bills) == excess
    assert all(each.ns > 0 for each in bills)
    assert len({each.cause for each in bills}) == len(bills)


def outliers_of(durations: list[int], rows: list[Happening], watched: tuple[int, ...] = (), warmup: int = 2) -> Any:
    ends = np.cumsum([0, *durations])
    flags = np.zeros(len(ends), bool)
    flags[list(watched)] = True
    return find_outliers(
        durations=np.array(durations, np.int64), end_ns=ends, data_ns=np.zeros(len(ends), np.int64), rows=rows,
        watched=flags, warmup=warmup,
    )  # fmt: skip


def test_outliers_are_found_and_billed() -> None:
    durations = [10 * MS] * 40
    durations[0] = 500 * MS  # warm-up
    durations[19] = 30 * MS  # step 20: the checkpoint
    durations[29] = 14 * MS  # within 1.5 times the median: none
    durations[34] = 80 * MS  # watched
    start = sum(durations[:19])
    found = outliers_of(durations, [Happening(kinds.CHECKPOINT, start + MS, start + 18 * MS, SAVE)], watched=(35,))
    assert [(each.step, each.step_ns, each.excess_ns, each.cause) for each in found] == [
        (20, 30 * MS, 20 * MS, kinds.CHECKPOINT)
    ]
    assert [(each.cause, each.ns) for each in found[0].bills] == [(kinds.CHECKPOINT, 17 * MS), (kinds.UNKNOWN, 3 * MS)]
    assert summarise(found) == [(kinds.CHECKPOINT, 1, 17 * MS), (kinds.UNKNOWN, 1, 3 * MS)]


def test_steps_of_every_length_have_no_outliers() -> None:
    assert outliers_of([(5 + 3 * (i % 7)) * MS for i in range(100)], []) == ()


def test_too_few_steps_are_not_judged() -> None:
    assert outliers_of([10 * MS, 90 * MS], []) == ()


# ---- what the hooks see, in a real loop ----


@contextmanager
def clocked() -> Iterator[tuple[LongClock, Callable[[], None]]]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    long = LongClock()
    long.install()
    try:
        yield long, optimizer.step
    finally:
        long.remove()


def causes(happened: Happenings) -> list[str]:
    """What was seen; Python may collect garbage whenever it likes."""
    return [row.cause for row in happened.rows if row.cause != kinds.COLLECTION]


def loader(num_batches: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(num_batches, 4)), batch_size=1)


def test_a_checkpoint_is_seen_with_its_line(tmp_path: Path) -> None:
    with clocked() as (long, step):
        step()
        torch.save({"weight": torch.ones(3)}, tmp_path / "a.pt")
        step()
    (row,) = [row for row in long.happenings.rows if row.cause != kinds.COLLECTION]
    assert row.cause == kinds.CHECKPOINT
    assert row.site is not None
    assert row.site.frame.file.endswith("test_long_run.py")
    assert "torch.save" in row.site.text
    assert long.clock.end_ns[0] <= row.start_ns < row.end_ns <= long.clock.end_ns[1]
    assert torch.load(tmp_path / "a.pt")["weight"].tolist() == [1, 1, 1]


def test_an_evaluation_is_seen_by_its_mode() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
    with clocked() as (long, step):
        step()
        model.eval()
        assert not any(module.training for module in model.modules())
        model.train()
        assert all(module.training for module in model.modules())
        step()
        model.eval()  # and left there: a frozen teacher
        step()
    assert causes(long.happenings) == [kinds.EVALUATION]


def test_an_evaluation_is_seen_by_batches_without_gradients() -> None:
    with clocked() as (long, step):
        for _ in loader(2):
            step()
        with torch.no_grad():
            for _ in loader(3):
                pass
        for _ in loader(1):
            step()
    assert sorted(causes(long.happenings)) == [kinds.EPOCH_END, kinds.EPOCH_END, kinds.EVALUATION]
    row = next(row for row in long.happenings.rows if row.cause == kinds.EVALUATION)
    assert long.clock.end_ns[1] <= row.start_ns < row.end_ns <= long.clock.end_ns[2]


def test_an_epoch_ends_where_a_loader_begins_anew() -> None:
    with clocked() as (long, step):
        for _ in range(3):
            for _ in loader(4):
                step()
    assert causes(long.happenings) == [kinds.EPOCH_END] * 3
    assert long.clock.num_steps == 12
    # The end of the first step is known with the second update: until then both count as one.
    assert (long.happenings.data_ns[2:] > 0).all()


def test_a_long_collection_is_seen() -> None:
    with clocked() as (long, step):
        step()
        garbage = [[i] for i in range(300_000)]
        gc.collect()
        step()
        del garbage
    assert any(row.cause == kinds.COLLECTION for row in long.happenings.rows)


def test_a_recompilation_is_seen() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    with clocked() as (long, step):
        step()
        compiled(torch.ones(2))
        step()
        assert causes(long.happenings) == []
        compiled(torch.ones(3))
        step()
    assert causes(long.happenings) == [kinds.RECOMPILATION]


def patched() -> list[Any]:
    """Everything that a long run replaces."""
    return [
        torch.save,
        torch.nn.Module.train,
        DataLoader.__iter__,
        torch.amp.GradScaler.update,
        list(gc.callbacks),
        torch.autograd._engine_run_backward,
    ]


def test_everything_is_as_before_even_after_an_error() -> None:
    before = patched()

    def interrupted() -> None:
        with clocked() as (_, step):
            step()
            assert patched() != before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert patched() == before


# ---- windows ----


def train(steps: int, between: Callable[[], None] = lambda: None, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for batch in torch.randn(steps, 4, 8):
        between()
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_windows_come_every_so_many_steps_and_change_no_number() -> None:
    bare = train(100)
    run = LongRun(Plan(warmup=1, active=3), every_n_steps=40)
    run.start()
    try:
        watched = train(100, run.between_steps)
    finally:
        run.stop()
    assert watched == bare
    assert run.num_steps == 100
    assert [report.source for report in run.windows] == [f"window at step {step}" for step in (0, 40, 80)]
    assert all(report.step is not None and report.step.num_steps == 3 for report in run.windows)
    flags = run.watched
    assert flags[:8].all()
    assert not flags[30:39].any()  # flags[i] is of step i + 1
    assert flags[39:47].all()


def test_windows_of_a_very_long_run_thin_out() -> None:
    run = LongRun(Plan(warmup=1, active=1), every_n_steps=12)
    run.start()
    try:
        train(12 * 40, run.between_steps)
    finally:
        run.stop()
    assert run.every_n_steps is not None
    assert run.every_n_steps > 12
    assert 8 <= len(run.windows) <= 16
    starts = [int(report.source.rsplit(" ", 1)[1]) for report in run.windows]
    assert starts[0] == 0
    assert starts == sorted(starts)


def test_without_an_interval_there_are_no_windows() -> None:
    run = LongRun()
    run.start()
    train(10, run.between_steps)
    run.stop()
    run.stop()
    assert run.windows == ()
    assert len(run.step_ns) == 9


@pytest.mark.parametrize("interval", [0, 3, -5, 2.5, True])
def test_an_interval_shorter_than_a_window_is_refused(interval: Any) -> None:
    with pytest.raises(UsageError, match="every_n_steps"):
        LongRun(Plan(warmup=5, active=10), every_n_steps=interval)


def test_a_session_over_a_whole_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.randn(200, 8)), batch_size=2)
    with perfdoctor.watch(warmup=1, active=3, every_n_steps=60) as session:
        for step, (batch,) in enumerate(session.batches(data)):
            model(batch).sum().backward()
            optimizer.step()
            time.sleep(0.002)
            if step == 50:
                for _ in range(3):
                    torch.save(model.state_dict(), tmp_path / "model.pt")
                    time.sleep(0.01)
    assert len(session.step_ns) == 99
    assert [report.source for report in session.windows] == ["window at step 0", "window at step 60"]
    slow = [outlier for outlier in session.outliers if outlier.step == 51]
    assert any(each.cause == kinds.CHECKPOINT for outlier in slow for each in outlier.bills)
    assert any(line.startswith("Over the whole run: ") for line in session.diagnosis().advice)


def test_it_adds_no_sync() -> None:
    with perfdoctor.emulate_cuda(), perfdoctor.sync_guard(budget=0):
        run = LongRun(Plan(warmup=1, active=2))
        run.start()
        try:
            model = torch.nn.Linear(8, 8, device="cuda")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(20):
                run.between_steps()
                model(torch.ones(4, 8, device="cuda")).sum().backward()
                optimizer.step()
        finally:
            run.stop()
        assert len(run.step_ns) == 19


@pytest.mark.gpu
def test_windows_on_the_device_are_recorded_and_taken_back() -> None:
    before = patched()
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    data = DataLoader(TensorDataset(torch.randn(4 * 160, 512)), batch_size=4)
    with perfdoctor.watch(warmup=2, active=4, every_n_steps=80) as session:
        for (batch,) in session.batches(data):
            loss = model(batch.cuda()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
    assert patched() == before
    assert [report.source for report in session.windows] == ["window at step 0", "window at step 80"]
    for report in session.windows:
        assert report.accounting is not None, report
        assert any(finding.kind == "item" for finding in (*report.findings, *report.leave_alone))
    assert len(session.step_ns) == 159
    assert 30 < int(session.watched.sum()) < 100


@pytest.mark.gpu
def test_it_adds_no_sync_on_the_device() -> None:
    model = torch.nn.Linear(256, 256, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.ones(64, 256, device="cuda")
    run = LongRun()
    run.start()
    try:
        with perfdoctor.sync_guard(budget=0):
            for _ in range(200):
                run.between_steps()
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        run.stop()
    torch.cuda.synchronize()
    lengths = run.step_ns
    assert len(lengths) == 199
    assert (lengths > 0).all()
    host = np.diff(run._clock.clock.end_ns)
    assert (lengths != host).any()  # by events, not by the host
