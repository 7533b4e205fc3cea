"""Treatments on trial in a real loop on the CPU: parity, time with a known answer, failures, everything put back."""

from __future__ import annotations

import gc
import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, TensorDataset
from treatment_runs import Over, run_trial

from perfdoctor.treat.switches import treatment
from perfdoctor.treat.treatment import Loop, Numerics, Treatment
from perfdoctor.trial.live_loop import LiveLoop
from perfdoctor.trial.treatment_time import TreatmentLimits
from perfdoctor.trial.treatments_trial import TreatmentsTrial
from perfdoctor.watch.patches import Patches

PAUSE_S = 0.025  # far over what a busy machine takes from a step


def _pause() -> None:
    time.sleep(PAUSE_S)


PAUSES = {"loop": _pause}


def _train(steps: int = 5000) -> None:
    """A script: a loader, a model in parts, an optimizer, and a pause that a treatment can take away."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
    done = 0
    while done < steps:
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            PAUSES["loop"]()
            done += 1


def _run(*treatments: Treatment, train: Callable[[], None] = _train) -> TreatmentsTrial:
    return run_trial(treatments, train, TreatmentLimits(seconds=30, rounds=6), failures_told=True)


@contextmanager
def _unpaused(loop: Loop) -> Iterator[Loop]:
    try:
        PAUSES["loop"] = lambda: None
        yield loop
    finally:
        PAUSES["loop"] = _pause


@contextmanager
def _wrong(loop: Loop) -> Iterator[Loop]:
    assert loop.model is not None
    patches, forward = Patches(), loop.model.forward
    try:
        patches.replace(loop.model, "forward", lambda x: forward(x) * 1.01)
        yield loop
    finally:
        patches.undo()


@contextmanager
def _full(loop: Loop) -> Iterator[Loop]:
    assert loop.model is not None

    def forward(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("planned")

    patches = Patches()
    try:
        patches.replace(loop.model, "forward", forward)
        yield loop
    finally:
        patches.undo()


@contextmanager
def _broken(loop: Loop) -> Iterator[Loop]:
    raise RuntimeError("cannot be applied")
    yield loop


def _treatment(name: str, applied: object, refusal: str | None = None, rtol: float = 0.0) -> Treatment:
    return Treatment(
        name=name, cures=(), numerics=Numerics(rtol=rtol), refuses=lambda _: refusal, applied=applied,  # type: ignore[arg-type]
        lines=(f"line of {name}",),
    )  # fmt: skip


def test_a_pause_taken_away_is_faster_with_equal_losses() -> None:
    trial = _run(_treatment("unpaused", _unpaused))
    (verdict,) = trial.verdicts
    assert verdict.accepted, verdict.reason
    assert verdict.parity.kept
    assert verdict.parity.difference == 0
    assert verdict.saving is not None
    assert verdict.saving.mid_ns > 0.9 * PAUSE_S * 1e9
    assert verdict.speed_up is not None
    assert 1 < verdict.speed_up.low <= verdict.speed_up.mid <= verdict.speed_up.high
    assert verdict.lines == ("line of unpaused",)
    assert PAUSES["loop"] is _pause


def test_what_seems_to_save_much_goes_on_once_all_have_been_tried() -> None:
    entered: list[str] = []

    @contextmanager
    def moody(loop: Loop) -> Iterator[Loop]:
        """The first is for the losses; of the next six blocks three save nothing, all later ones save."""
        entered.append("moody")
        with _unpaused(loop):
            if entered.count("moody") in (3, 5, 7):
                PAUSES["loop"] = _pause
            yield loop

    @contextmanager
    def plain(loop: Loop) -> Iterator[Loop]:
        entered.append("plain")
        yield loop

    moody_one, plain_one = _run(_treatment("moody", moody), _treatment("plain", plain)).verdicts
    # Half of it or nothing, by six rounds: no claim. With twelve more, of eighteen three saved nothing.
    order = [name for name, _ in itertools.groupby(entered)]
    assert order[:3] == ["moody", "plain", "moody"]
    assert order[3:] in ([], ["plain"])  # on a busy machine it may seem to save something as well
    assert entered.count("moody") == 1 + 6 + 12
    assert moody_one.accepted, moody_one.reason
    assert moody_one.saving is not None
    assert moody_one.saving.num_pairs == 18
    assert not plain_one.accepted


def test_one_that_takes_all_time_is_cut_for_the_others() -> None:
    @contextmanager
    def crawling(loop: Loop) -> Iterator[Loop]:
        try:
            PAUSES["loop"] = lambda: time.sleep(0.6)
            yield loop
        finally:
            PAUSES["loop"] = _pause

    limits = TreatmentLimits(seconds=20, rounds=6)  # 16 s for the two
    both = [_treatment("crawling", crawling), _treatment("unpaused", _unpaused)]
    crawled, unpaused = run_trial(both, _train, limits, failures_told=True).verdicts
    assert crawled.reason.startswith("cut off after ")
    assert crawled.wants_time
    assert unpaused.accepted, unpaused.reason


def test_one_that_is_tried_only_by_name_is_told_as_refused_where_it_does_not_fit() -> None:
    live = LiveLoop()
    names = ("dear", "dear_and_unfit", "plain")
    treatments = [_treatment(name, _unpaused, "no such device" if "unfit" in name else None) for name in names]
    trial = TreatmentsTrial(treatments, live, left_out=dict.fromkeys(names[:2], "only by name"), num_judged=4)
    assert trial.how_far() == "the loop as it is, 4 of 7 treatments judged"
    trial._sort_out(Loop(device=torch.device("cpu")))
    assert [verdict.reason for verdict in trial.verdicts] == [
        "not tried: only by name", "does not fit: no such device",
    ]  # fmt: skip
    assert trial.how_far() == "the loop as it is, 6 of 7 treatments judged"
    trial.close()


def test_one_that_fails_when_it_goes_on_is_one_verdict() -> None:
    entered: list[int] = []

    @contextmanager
    def fragile(loop: Loop) -> Iterator[Loop]:
        entered.append(1)
        if len(entered) > 10:
            raise RuntimeError("not once more")
        with _unpaused(loop):
            if len(entered) in (3, 5, 7):
                PAUSES["loop"] = _pause
            yield loop

    (verdict,) = _run(_treatment("fragile", fragile)).verdicts
    assert verdict.reason == "failed: RuntimeError: not once more"


def test_other_numbers_refusals_and_failures_are_verdicts() -> None:
    trial = _run(
        _treatment("wrong", _wrong),
        _treatment("unfit", _unpaused, refusal="no such device"),
        _treatment("broken", _broken),
    )
    unfit, wrong, broken = trial.verdicts
    assert not any(verdict.accepted for verdict in trial.verdicts)
    assert wrong.parity.kept is False
    assert "not timed" in wrong.reason
    assert unfit.reason == "does not fit: no such device"
    assert broken.reason == "failed: RuntimeError: cannot be applied"


@contextmanager
def _sticky(loop: Loop) -> Iterator[Loop]:
    yield loop
    raise RuntimeError("stays on")


def test_what_cannot_be_taken_back_is_left_to_processes() -> None:
    trial = _run(_treatment("sticky", _sticky), _treatment("unpaused", _unpaused))
    assert [(each.name, why) for each, why in trial.deferred] == [
        ("sticky", "it could not be taken back (RuntimeError: stays on)")
    ]
    assert [verdict.treatment for verdict in trial.verdicts] == ["unpaused"]


def test_an_error_in_the_script_is_the_active_treatments() -> None:
    trial = _run(_treatment("full", _full))
    (verdict,) = trial.verdicts
    assert verdict.reason == "failed: out of memory: OutOfMemoryError: planned"
    assert trial.active == ""


def test_the_live_loop_sees_the_outermost_module_the_optimizer_and_the_loader() -> None:
    seen: list[Loop] = []

    def look(loop: Loop) -> str:
        seen.append(loop)
        return "only looking"

    before = (torch.Tensor.backward, DataLoader.__iter__)
    treatment = Treatment(name="look", cures=(), numerics=Numerics(), refuses=look, applied=_unpaused)
    _run(treatment)
    (loop,) = seen
    assert isinstance(loop.model, torch.nn.Sequential)
    assert isinstance(loop.optimizers[0], torch.optim.SGD)
    assert isinstance(loop.loader, DataLoader)
    assert (torch.Tensor.backward, DataLoader.__iter__) == before


KEPT: dict[str, object] = {}


class Words(Dataset[torch.Tensor]):
    """Rows that know their number; each takes a while, as a tokenizer does."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.pause_s)
        return torch.full((4,), index / 48)


def _train_words(pause_s: float, workers: int = 0, steps: int = 5000) -> None:
    """Short epochs, shuffled, a schedule that changes the rate at every step, dropout."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    loader = DataLoader(Words(pause_s), batch_size=4, shuffle=True, num_workers=workers)
    KEPT.update(model=model, optimizer=optimizer, schedule=schedule, loader=loader)
    done = 0
    while done < steps:
        for x in loader:
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            schedule.step()
            time.sleep(4 * pause_s)  # as long as the loader takes for a batch: a worker halves the step
            done += 1


def _words(pause_s: float, workers: int, *names: str) -> TreatmentsTrial:
    return _run(*map(treatment, names), train=lambda: _train_words(pause_s, workers))


def test_workers_take_a_slow_loader_off_the_loop_with_equal_losses() -> None:
    (verdict,) = _words(0.002, 0, "dataloader_workers").verdicts
    assert verdict.parity.difference == 0  # the same order, though it is the worker that fetches
    assert verdict.speed_up is not None
    assert verdict.speed_up.mid > 1.3
    assert vars(KEPT["loader"])["num_workers"] == 0


def test_workers_that_persist_are_measured_over_whole_epochs() -> None:
    (verdict,) = _words(0.0, 1, "persistent_workers").verdicts
    assert verdict.before is not None, verdict.reason
    assert verdict.parity.difference == 0
    assert verdict.before.num_steps % 12 == 0  # twelve batches an epoch, one start of workers in each
    assert vars(KEPT["loader"])["persistent_workers"] is False
    assert vars(KEPT["loader"])["_iterator"] is None


@pytest.mark.parametrize("name", ["fused_optimizer", "bf16_autocast", "set_to_none", "gc_frozen"])
def test_a_real_treatment_is_measured_and_taken_back(name: str) -> None:
    (verdict,) = _words(0.0, 0, name).verdicts
    assert verdict.saving is not None, verdict.reason
    assert verdict.parity.kept
    optimizer, model = KEPT["optimizer"], KEPT["model"]
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(model, torch.nn.Module)
    assert not optimizer.param_groups[0].get("fused")
    assert "zero_grad" not in vars(optimizer)
    assert "forward" not in vars(model)
    assert gc.isenabled()


def test_the_state_at_the_end_is_that_before_the_first_treatment() -> None:
    """Ten steps are observed; then everything is put back, the schedule too: as ten steps alone."""
    _words(0.0, 0, "fused_optimizer")
    optimizer, schedule = KEPT["optimizer"], KEPT["schedule"]
    assert isinstance(optimizer, torch.optim.AdamW)
    tried = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    counts = {int(held["step"]) for held in optimizer.state.values()}
    last = schedule.last_epoch  # type: ignore[attr-defined]
    assert counts == {10}
    assert last in (9, 10)
    again = _stopped_after(10)
    assert all(torch.equal(a, b) for a, b in zip(tried, again, strict=True))


def _stopped_after(number: int) -> list[torch.Tensor]:
    seen = 0

    def stop(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            raise Over

    handle = register_optimizer_step_post_hook(stop)
    try:
        _train_words(0.0)
    except Over:
        pass
    finally:
        handle.remove()
    optimizer = KEPT["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW)
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs g++")
def test_compilation_is_tried_and_undone() -> None:
    (verdict,) = _words(0.0, 0, "compile").verdicts
    assert verdict.saving is not None, verdict.reason
    model = KEPT["model"]
    assert isinstance(model, torch.nn.Module)
    assert model._compiled_call_impl is None
    assert "compared without dropout" in verdict.parity.text  # compiled code draws other masks
    assert [each.p for each in model.modules() if isinstance(each, torch.nn.Dropout)] == [0.5]
