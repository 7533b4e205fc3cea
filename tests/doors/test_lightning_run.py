"""A whole Lightning fit on the clock, between the windows: outliers billed to what Lightning did in them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fits import ADVICE, fit, logged, net_of, pl

import perfdoctor
from perfdoctor.doors.lightning import PerfDoctorCallback
from perfdoctor.watch import happenings as kinds

pytestmark = [pytest.mark.filterwarnings(each) for each in ADVICE]

# A fit of three epochs of 20 steps. A window of 2 + 3 + 1 + 3 steps lies at 0 and at 30.
STEPS = {"max_steps": 60, "limit_val_batches": 1}


def slow_step(self: Any, batch: Any, batch_idx: int) -> Any:
    time.sleep(0.004)
    loss = self.loss_of(batch)
    self.log("loss", loss)
    return loss


def causes_of(callback: PerfDoctorCallback) -> dict[int, str]:
    """The largest bill of each outlier; a shared machine makes outliers of its own, which nobody is billed for."""
    return {each.step: each.cause for each in callback.outliers if each.cause not in (kinds.UNKNOWN, kinds.DATA_WAIT)}


def test_an_evaluation_is_billed_to_the_step_after_it(tmp_path: Path) -> None:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.1)

    callback = PerfDoctorCallback(warmup=2, active=3, every_n_steps=30)
    model = net_of(training_step=slow_step, validation_step=validation_step)
    fit(tmp_path, [callback], model, val_check_interval=7, **STEPS)
    # Evaluations come after the steps 6 and 13 of each epoch; those of watched steps are nobody's outliers.
    found = {step for step, cause in causes_of(callback).items() if cause == kinds.EVALUATION}
    assert found == {14, 27, 47, 54}
    for each in callback.outliers:
        if each.step in found:
            billed = sum(row.ns for row in each.bills if row.cause == kinds.EVALUATION)
            assert 0.08e9 <= billed <= each.excess_ns
            assert sum(row.ns for row in each.bills) == each.excess_ns


def test_a_checkpoint_is_billed_with_the_line_that_led_there(tmp_path: Path) -> None:
    def on_save_checkpoint(self: Any, checkpoint: Any) -> None:
        time.sleep(0.1)

    callback = PerfDoctorCallback(warmup=2, active=3, every_n_steps=30)
    saves = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=23, save_top_k=-1)
    model = net_of(training_step=slow_step, on_save_checkpoint=on_save_checkpoint)
    fit(tmp_path, [callback, saves], model, enable_checkpointing=True, **STEPS)
    found = causes_of(callback)
    # Written by a callback that runs after ours at the end of the batches 22 and 45.
    assert [step for step, cause in found.items() if cause == kinds.CHECKPOINT] == [23, 46]
    bill = next(row for each in callback.outliers if each.step == 23 for row in each.bills)
    assert bill.ns >= 0.08e9
    assert bill.site is not None
    assert "trainer.fit" in bill.site.text
    assert bill.site.library is not None
    assert bill.site.library.owner == "lightning"


def test_the_end_of_an_epoch_is_billed(tmp_path: Path) -> None:
    def on_train_epoch_end(self: Any) -> None:
        time.sleep(0.1)

    callback = PerfDoctorCallback(warmup=2, active=3, every_n_steps=60)
    fit(tmp_path, [callback], net_of(training_step=slow_step, on_train_epoch_end=on_train_epoch_end), **STEPS)
    assert {step for step, cause in causes_of(callback).items() if cause == kinds.EPOCH_END} == {20, 40}


def test_a_recompilation_and_a_collection_are_billed(tmp_path: Path) -> None:
    import gc

    torch._dynamo.reset()
    doubled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        step = self.trainer.global_step
        time.sleep(0.004)
        if step in (0, 22):  # the second time with another shape
            doubled(torch.ones(2 + step))
            time.sleep(0.1)
        if step == 50:
            self.garbage = [[i] for i in range(400_000)]
            for _ in range(20):
                gc.collect()
        return self.loss_of(batch)

    callback = PerfDoctorCallback(warmup=2, active=3, every_n_steps=30)
    fit(tmp_path, [callback], net_of(training_step=training_step), **STEPS)
    found = causes_of(callback)
    assert found[22] == kinds.RECOMPILATION
    assert found[50] == kinds.COLLECTION


def test_what_is_said_of_the_whole_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def on_train_epoch_end(self: Any) -> None:
        time.sleep(0.1)

    model = net_of(training_step=slow_step, on_train_epoch_end=on_train_epoch_end)
    expected, _ = fit(tmp_path / "bare", model=model, **STEPS)
    callback = PerfDoctorCallback(warmup=2, active=3, every_n_steps=30, report_dir=tmp_path / "reports")
    losses, _ = fit(tmp_path, [callback], model, logger=pl.loggers.CSVLogger(tmp_path), **STEPS)
    assert losses == expected
    assert len(callback.step_ns) == len(callback.watched) == 59
    assert 18 <= callback.watched.sum() <= 40
    assert callback.report is not None
    printed = capsys.readouterr().out
    assert printed.count("Over the whole run: ") == 1
    assert "epoch end" in printed
    document = json.loads((tmp_path / "reports" / "perfdoctor-step000030.json").read_text())
    assert any(line.startswith("Over the whole run: ") for line in document["advice"])
    assert not any("whole run" in line for line in _advice(tmp_path / "reports" / "perfdoctor-step000000.json"))
    line = next(line for line in logged(tmp_path) if "perfdoctor/bare_step_ms" in line)
    assert line["perfdoctor/bare_step_ms"] >= 4
    assert line["perfdoctor/outlier_ms/epoch_end"] >= 80


def _advice(path: Path) -> list[str]:
    return list(json.loads(path.read_text())["advice"])


def test_resumed_steps_keep_the_trainers_count(tmp_path: Path) -> None:
    def on_train_epoch_end(self: Any) -> None:
        time.sleep(0.1)

    model = net_of(training_step=slow_step, on_train_epoch_end=on_train_epoch_end)
    options = {"enable_checkpointing": True, "limit_val_batches": 1}
    _, trainer = fit(tmp_path, model=model, max_epochs=1, max_steps=-1, **options)
    callback = PerfDoctorCallback(warmup=2, active=3, every_n_steps=40)
    path = trainer.checkpoint_callback.best_model_path
    fit(tmp_path, [callback], model, max_epochs=3, max_steps=-1, ckpt_path=path, **options)
    assert [step for step, cause in causes_of(callback).items() if cause == kinds.EPOCH_END] == [40]
    assert len(callback.step_ns) == 39
    assert all(20 < each.step < 60 for each in callback.outliers)


def test_without_an_interval_no_step_is_timed(tmp_path: Path) -> None:
    callback = PerfDoctorCallback(warmup=2, active=3)
    assert callback.outliers == ()
    fit(tmp_path, [callback])
    assert callback.outliers == ()
    assert len(callback.step_ns) == len(callback.watched) == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_stays_hooked_after_an_error(error: type[BaseException], tmp_path: Path) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if len(self.losses) == 25:
            raise error("the user's own")
        return self.loss_of(batch)

    callback = PerfDoctorCallback(warmup=2, active=3, every_n_steps=30)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else ValueError):
        fit(tmp_path, [callback], net_of(training_step=training_step))
    assert len(callback.step_ns) == 24
    assert callback.report is not None
    assert any("Over the whole run" in line for line in callback.report.advice)


def test_it_adds_no_sync(tmp_path: Path) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(batch)

    callback = PerfDoctorCallback(warmup=2, active=3, every_n_steps=12)
    counts = []
    with perfdoctor.emulate_cuda():
        fit(tmp_path, [], net_of(training_step=training_step), accelerator="gpu")  # the first sets up more
        for callbacks in ([], [callback]):
            with perfdoctor.sync_guard(mode="record") as guard:
                fit(tmp_path, callbacks, net_of(training_step=training_step), accelerator="gpu")
            counts.append(sum(row.first_step + row.later_steps for row in guard.sites))
    assert counts[0] == counts[1]
    assert len(callback.step_ns) == 29
