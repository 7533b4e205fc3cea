"""`--seconds` is kept: what runs when the time is over is cut, wherever it is; what does not fit is not begun."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset
from treatment_runs import Over, run_trial

from perfdoctor.doors import treatment_trial
from perfdoctor.treat.treatment import Loop, Numerics, Treatment
from perfdoctor.trial.deadline import Deadline
from perfdoctor.trial.live_loop import LiveLoop
from perfdoctor.trial.treatment_time import TreatmentLimits
from perfdoctor.trial.treatments_trial import TreatmentsTrial
from perfdoctor.watch.clocks import stamp_now
from perfdoctor.watch.patches import Patches

SIGNALS = (signal.SIGVTALRM, signal.SIGPROF, signal.SIGUSR2)
PAUSE_S = 0.002
PAUSE = {"s": PAUSE_S}
MODELS: list[torch.nn.Module] = []


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """The first step of a process imports parts of torch for seconds: no part of any time that is kept here."""
    weight = torch.ones(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.SGD([weight], 0.1).step()


def _train() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    MODELS[:] = [model]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)
    while True:
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            time.sleep(PAUSE["s"])


def _run(*treatments: Treatment, seconds: float) -> TreatmentsTrial:
    limits = TreatmentLimits(seconds=seconds, each_seconds=1e6, rounds=10**6)
    return run_trial(treatments, _train, limits, failures_told=False)


def _with_forward(name: str, forward: Callable[[torch.Tensor], torch.Tensor]) -> Treatment:
    @contextmanager
    def applied(loop: Loop) -> Iterator[Loop]:
        patches = Patches()
        try:
            patches.replace(loop.model, "forward", forward)
            yield loop
        finally:
            patches.undo()

    return Treatment(name=name, cures=(), numerics=Numerics(), refuses=lambda _: None, applied=applied)


def _treatment(name: str, hangs_in_block: int = 10**9, pause_s: float = PAUSE_S) -> Treatment:
    """Its block of that number (the comparison of losses is the first) never comes to an end by itself."""
    times = 0

    def forward(_: torch.Tensor) -> torch.Tensor:
        while True:
            time.sleep(0.01)

    @contextmanager
    def applied(loop: Loop) -> Iterator[Loop]:
        nonlocal times
        assert loop.model is not None
        times += 1
        patches = Patches()
        try:
            PAUSE["s"] = pause_s
            if times == hangs_in_block:
                patches.replace(loop.model, "forward", forward)
            yield loop
        finally:
            PAUSE["s"] = PAUSE_S
            patches.undo()

    return Treatment(name=name, cures=(), numerics=Numerics(), refuses=lambda _: None, applied=applied)


def test_a_first_step_that_goes_on_and_on_is_cut_and_said() -> None:
    trial = _run(_treatment("endless", 1), _treatment("next"), seconds=3.0)
    endless, other = trial.verdicts
    assert endless.reason.startswith("cut off after ")
    assert "its losses were compared" in endless.reason
    assert endless.wants_time
    assert other.reason.startswith("not timed: 6 rounds of blocks of ")
    assert other.reason.endswith(" s were left (--seconds)")
    assert "forward" not in vars(MODELS[0])
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_DFL] * len(SIGNALS)


def test_a_loop_whose_steps_nobody_sees_is_ended_too() -> None:
    def ended() -> None:
        raise Over

    trial = TreatmentsTrial((_treatment("plain"),), LiveLoop(), limits=TreatmentLimits(seconds=0.2), ended=ended)
    with pytest.raises(Over):
        threading.Event().wait(60)
    trial.close()
    assert [verdict.reason for verdict in trial.verdicts] == ["not tried: the time was spent (--seconds)"]


def test_nothing_is_taken_back_in_the_middle_of_what_a_compiler_does() -> None:
    """It traces with fake tensors, for which the values that are put back are none: that waits until it has unwound."""

    def forward(_: torch.Tensor) -> torch.Tensor:
        with FakeTensorMode():
            while True:
                time.sleep(0.01)

    (verdict,) = _run(_with_forward("traced", forward), seconds=3.0).verdicts
    assert verdict.reason.startswith("cut off after "), verdict.reason


def test_a_destructor_is_not_interrupted_and_the_loop_ends_all_the_same() -> None:
    destroyed: list[float] = []

    class Slow:
        def __del__(self) -> None:
            until = time.perf_counter() + 4
            while time.perf_counter() < until:
                pass
            destroyed.append(until)

    def forward(x: torch.Tensor) -> torch.Tensor:
        Slow()
        return x.sum().requires_grad_()

    (verdict,) = _run(_with_forward("destroying", forward), seconds=3.0).verdicts  # no exception is ignored in it
    assert verdict.reason.startswith("cut off after "), verdict.reason
    assert len(destroyed) == 1


def test_an_import_is_not_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slowly_imported.py").write_text(
        "import time\nfor _ in range(20):\n    time.sleep(0.01)\ndone = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    calls: list[bool] = []
    deadline = Deadline(lambda: calls.append("slowly_imported" in sys.modules))
    deadline.set(time.perf_counter() + 0.05)
    try:
        module = importlib.import_module("slowly_imported")
        assert module.done
        assert not calls
        while not calls:
            time.sleep(0.01)
        time.sleep(0.2)
    finally:
        deadline.clear()
        sys.modules.pop("slowly_imported", None)
    assert calls == [True]  # once


def test_a_script_that_catches_its_end_is_ended_at_its_next_step() -> None:
    ends: list[str] = []

    def ended() -> None:
        ends.append("ended")
        raise Over

    trial = TreatmentsTrial((_treatment("plain"),), LiveLoop(), limits=TreatmentLimits(seconds=0.1), ended=ended)
    with suppress(Over):
        threading.Event().wait(60)
    for _ in range(2):
        with pytest.raises(Over):
            trial.step_ended(stamp_now())
    assert len(ends) == 3
    assert len(trial.verdicts) == 1


def test_an_end_of_time_that_comes_while_a_step_s_end_cuts_changes_nothing() -> None:
    """The thread that rings may be late: by then a step has ended, and what is on is being taken back."""
    ending = False

    @contextmanager
    def applied(loop: Loop) -> Iterator[Loop]:
        try:
            yield loop
        finally:
            if ending:
                trial._end_of_time()

    treatment = Treatment(name="slow end", cures=(), numerics=Numerics(), refuses=lambda _: None, applied=applied)
    live = LiveLoop()
    limits = TreatmentLimits(seconds=60, each_seconds=1e6, rounds=10**6)
    trial = TreatmentsTrial((treatment,), live, limits=limits, ended=lambda: None)
    for _ in range(30):
        trial.step_ended(stamp_now())
        if trial.active:
            break
    assert trial.active == "slow end"
    ending = True
    trial._deadline.until = 0.0
    trial.step_ended(stamp_now())
    (verdict,) = trial.verdicts
    assert verdict.reason.startswith("cut off after "), verdict.reason


def test_an_end_of_time_just_behind_the_end_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to be stopped then: what was judged comes, and no exception."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "for x in torch.utils.data.DataLoader(torch.ones(60, 4)):\n"
        "    model(x).sum().backward()\n"
        "    optimizer.step()\n"
        "    if optimizer.state[model.bias]['step'] > 45:\n"
        "        break\n"
    )
    trials: list[TreatmentsTrial] = []
    run, made = treatment_trial.execute_program, TreatmentsTrial

    def executed(program: Any) -> tuple[int, bool]:
        code = run(program)
        assert not trials[-1].over
        trials[-1]._end_of_time()
        return code

    def kept(*args: Any, **kwargs: Any) -> TreatmentsTrial:
        trials.append(made(*args, **kwargs))
        return trials[-1]

    monkeypatch.setattr(treatment_trial, "execute_program", executed)
    monkeypatch.setattr(treatment_trial, "TreatmentsTrial", kept)
    options = treatment_trial.TreatmentOptions(names=("fused_optimizer",), limits=TreatmentLimits(seconds=60))
    result = treatment_trial.try_treatments(str(tmp_path / "train.py"), (), options)
    assert [verdict.reason.startswith(("cut off", "not tried")) for verdict in result.verdicts] == [True]
    assert result.exit_code == 0


def test_what_was_measured_before_the_cut_is_a_verdict() -> None:
    # After seven pairs; one that saves nothing ends with six.
    (verdict,) = _run(_treatment("late", 9, pause_s=0.001), seconds=6.0).verdicts
    assert verdict.saving is not None, verdict.reason
    assert verdict.saving.num_pairs == 7
    assert verdict.parity.kept
    (verdict,) = _run(_treatment("early", 4), seconds=4.0).verdicts
    assert "round 3" in verdict.reason
    assert verdict.parity.kept
    assert verdict.saving is None


def test_blocks_that_do_not_fit_are_not_begun() -> None:
    """It looks as though it fits until the comparison shows that another loader, with a long queue, is to be timed."""
    begun: list[int] = []

    @contextmanager
    def applied(loop: Loop) -> Iterator[Loop]:
        begun.append(1)
        other = DataLoader(TensorDataset(torch.zeros(64, 4)), batch_size=4, num_workers=1, prefetch_factor=500)
        yield replace(loop, loader=other)

    treatment = Treatment(name="queue", cures=(), numerics=Numerics(), refuses=lambda _: None, applied=applied)
    (verdict,) = _run(treatment, seconds=6.0).verdicts
    assert "6 rounds of blocks of" in verdict.reason
    assert verdict.wants_time
    assert verdict.parity.kept
    assert len(begun) == 1


def test_signals_that_the_script_handles_are_its_own() -> None:
    """The first one that it does not handle is taken; where it handles all, the time is looked at between steps."""
    rung: list[int] = []
    for taken in (SIGNALS[:1], SIGNALS):
        try:
            for number in taken:
                signal.signal(number, lambda number, _: rung.append(number))
            trial = _run(_treatment("plain"), seconds=3.0)
            signal.raise_signal(taken[0])
        finally:
            for number in taken:
                signal.signal(number, signal.SIG_DFL)
        assert len(trial.verdicts) == 1
    assert rung == [SIGNALS[0], SIGNALS[0]]


def _in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_in_another_thread_it_is_cut_at_the_end_of_a_step() -> None:
    trials: list[TreatmentsTrial] = []
    _in_thread(lambda: trials.append(_run(_treatment("plain"), seconds=2.0)))
    assert len(trials[0].verdicts) == 1
    assert trials[0].over


def test_a_deadline_that_is_cleared_or_moved_does_not_call() -> None:
    calls: list[float] = []
    deadline = Deadline(lambda: calls.append(time.perf_counter()))
    deadline.set(time.perf_counter() + 0.05)
    deadline.clear()
    deadline.clear()
    time.sleep(0.1)
    assert not calls
    later = time.perf_counter() + 0.2
    deadline.set(time.perf_counter() + 0.05)
    deadline.set(later)
    while not calls:
        time.sleep(0.01)
    deadline.clear()
    assert calls[0] >= later
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_DFL] * len(SIGNALS)


def test_a_deadline_of_the_main_thread_may_be_moved_in_another() -> None:
    """A script may train in a thread of its own; there only `past` is left."""
    calls: list[int] = []
    deadline = Deadline(lambda: calls.append(1))
    deadline.set(time.perf_counter() + 0.1)
    _in_thread(lambda: deadline.set(time.perf_counter() + 0.2))
    time.sleep(0.3)
    assert deadline.past
    assert not calls
    deadline.clear()
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_DFL] * len(SIGNALS)
