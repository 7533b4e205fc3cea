"""A real Trainer of transformers, with a tiny model from a config, watched by PerfDoctorTrainerCallback."""

import json
import subprocess
import sys
import time

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")
accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

import perfdoctor  # noqa: E402
from perfdoctor.doors import session as sessions  # noqa: E402
from perfdoctor.doors.huggingface import PerfDoctorTrainerCallback  # noqa: E402
from perfdoctor.errors import SessionError, UsageError  # noqa: E402
from perfdoctor.watch import happenings as kinds  # noqa: E402

pytestmark = [
    # A DataLoader that pins memory where there is no GPU.
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]


@pytest.fixture(autouse=True)
def _no_device_of_another_test():
    """Accelerate keeps the device of its first use for the whole process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Losses(transformers.TrainerCallback):
    """The loss of each step, from the Trainer's log."""

    def __init__(self):
        self.values = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.values.append(logs["loss"])


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 12) % 50
        return {"input_ids": tokens, "labels": tokens}


def trainer_of(tmp_path, callbacks=(), kind=transformers.Trainer, **options):
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2, attn_implementation="eager"
    )
    torch.manual_seed(0)
    options = {"max_steps": 30, "use_cpu": True, **options}
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), report_to=[], logging_steps=1, disable_tqdm=True,
        per_device_train_batch_size=4, dataloader_pin_memory=False, seed=3, **{"save_strategy": "no", **options},
    )  # fmt: skip
    losses = Losses()
    trainer = kind(
        transformers.GPT2LMHeadModel(config), arguments, train_dataset=Rows(), callbacks=[losses, *callbacks],
        eval_dataset=Rows() if "eval_strategy" in options else None,
    )  # fmt: skip
    return trainer, losses.values


def hooked(trainer):
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    return (
        len(optimizer._global_optimizer_post_hooks), len(optimizer._global_optimizer_pre_hooks),
        dataloader._BaseDataLoaderIter.__next__, torch.autograd.backward, sorted(vars(trainer.callback_handler)),
        torch.save, torch.nn.Module.train, torch.utils.data.DataLoader.__iter__,
        sorted(name for name in vars(trainer) if callable(getattr(type(trainer), name, None))),
    )  # fmt: skip


def train(tmp_path, callbacks=(), resume=None, **options):
    """The losses; nothing may be left hooked."""
    trainer, losses = trainer_of(tmp_path, callbacks, **options)
    before = hooked(trainer)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        assert hooked(trainer) == before
        assert sessions.running() is None
    return losses, trainer


def test_a_training_is_watched_and_reported(tmp_path, capsys):
    expected, _ = train(tmp_path)
    callback = PerfDoctorTrainerCallback(warmup=3, active=4, report_dir=tmp_path / "reports")
    assert isinstance(callback, transformers.TrainerCallback)
    losses, trainer = train(tmp_path, [callback])
    assert losses == expected
    assert len(losses) == 30
    assert callback.report.step.num_steps == 4
    assert callback.report.samples_per_s > 0
    assert capsys.readouterr().out.count("perfdoctor: session on") == 1
    document = json.loads((tmp_path / "reports" / "perfdoctor.json").read_text())
    assert document["verdict"]["step"]["num_steps"] == 4
    assert (tmp_path / "reports" / "perfdoctor.txt").read_text().startswith("perfdoctor: session on")
    line = next(line for line in trainer.state.log_history if "perfdoctor/step_ms" in line)
    assert line["perfdoctor/step_ms"] == pytest.approx(document["verdict"]["step"]["median_ms"], abs=0.001)
    assert line["perfdoctor/data_wait_ms"] > 0


def test_importing_costs_no_transformers():
    code = (
        "import sys, perfdoctor, perfdoctor.doors.huggingface\n"
        "assert not {'transformers', 'accelerate'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_accumulated_steps(tmp_path):
    callback = PerfDoctorTrainerCallback(warmup=2, active=3)
    options = {"gradient_accumulation_steps": 2, "max_steps": 16}
    expected, _ = train(tmp_path, **options)
    losses, _ = train(tmp_path, [callback], **options)
    assert losses == expected
    assert callback.report.micro_batches == 2


def test_another_window_every_n_steps(tmp_path):
    callback = PerfDoctorTrainerCallback(warmup=2, active=3, every_n_steps=25, report_dir=tmp_path / "reports")
    _, trainer = train(tmp_path, [callback], max_steps=70)
    names = sorted(path.name for path in (tmp_path / "reports").glob("*.json"))
    assert names == ["perfdoctor-step000000.json", "perfdoctor-step000025.json", "perfdoctor-step000050.json"]
    steps = [line["step"] for line in trainer.state.log_history if "perfdoctor/step_ms" in line]
    assert all(start + 9 <= step < start + 25 for step, start in zip(steps, (0, 25, 50), strict=True))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["step", "callback", "data", "end"])
def test_an_exception_is_passed_on_with_a_report(error, place, tmp_path, capsys, monkeypatch):
    callback = PerfDoctorTrainerCallback(warmup=2, active=3, report_dir=tmp_path)

    class Failing(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if place == "callback" and state.global_step == 17:
                raise error("the user's own")

    trainer, _ = trainer_of(tmp_path, [callback, Failing()])

    def failing(*args, **kwargs):
        if trainer.state.global_step >= 17:
            raise error("the user's own")
        return original(*args, **kwargs)

    patched = {
        "step": (type(trainer), "training_step"), "data": (Rows, "__getitem__"), "end": (type(trainer), "store_flos"),
    }  # fmt: skip
    if place in patched:
        original = getattr(*patched[place])
        monkeypatch.setattr(*patched[place], failing)
    before = hooked(trainer)
    with pytest.raises(error, match="the user's own"):
        trainer.train()
    assert hooked(trainer) == before
    assert sessions.running() is None
    assert callback.report.step.num_steps == 3
    assert (tmp_path / "perfdoctor.txt").exists()
    assert capsys.readouterr().out.count("perfdoctor: session on") == 1


@pytest.mark.parametrize("every", [None, 20])
def test_training_is_resumed_from_a_checkpoint(every, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 20}
    whole, _ = train(tmp_path / "whole", max_steps=60, **options)
    callback = PerfDoctorTrainerCallback(warmup=2, active=3, every_n_steps=every, report_dir=tmp_path / "reports")
    rest, trainer = train(
        tmp_path / "whole", [callback], resume=str(tmp_path / "whole" / "checkpoint-20"), max_steps=60, **options
    )
    assert rest == whole[20:]  # to the bit: the same batches in the same order
    assert trainer.state.global_step == 60
    assert callback.report.step.num_steps == 3
    assert callback.report.samples_per_s > 0
    # The window begins with the steps that are trained, not with those that are skipped, and is named for them.
    names = sorted(path.name for path in (tmp_path / "reports").glob("*.json"))
    at = ["perfdoctor-step000020.json", "perfdoctor-step000040.json"]
    assert names == (["perfdoctor.json"] if every is None else at)
    # That of the checkpoint, which was bare, has none of ours.
    logged_at = [line["step"] for line in trainer.state.log_history if "perfdoctor/step_ms" in line]
    assert [20 < step <= 60 for step in logged_at] == [True] * (1 if every is None else 2)
    assert len(callback.step_ns) == (0 if every is None else 39)


def test_outliers_are_billed_to_what_the_trainer_did(tmp_path):
    class Slow(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            time.sleep(0.004)

        def on_epoch_end(self, args, state, control, **kwargs):
            time.sleep(0.1)

        def on_prediction_step(self, args, state, control, **kwargs):
            time.sleep(0.1)

    class Saving(transformers.Trainer):
        def save_model(self, *args, **kwargs):
            time.sleep(0.1)
            super().save_model(*args, **kwargs)

    callback = PerfDoctorTrainerCallback(warmup=2, active=3, every_n_steps=50, report_dir=tmp_path / "reports")
    # 160 rows: an epoch is 40 steps. The first window lies before step 20, the second at 50, the third at 100.
    trainer, _ = trainer_of(
        tmp_path, [callback, Slow()], kind=Saving, max_steps=125, save_strategy="steps", save_steps=33,
        eval_strategy="steps", eval_steps=25, per_device_eval_batch_size=200,
    )  # fmt: skip
    before = hooked(trainer)
    trainer.train()
    assert hooked(trainer) == before
    found = {each.step: each.cause for each in callback.outliers if each.cause not in (kinds.UNKNOWN, kinds.DATA_WAIT)}
    assert {found.get(step) for step in (25, 75)} == {kinds.EVALUATION}
    assert {found.get(step) for step in (33, 99)} == {kinds.CHECKPOINT}
    assert {found.get(step) for step in (40, 80)} == {kinds.EPOCH_END}
    saved = next(row for each in callback.outliers if each.step == 33 for row in each.bills)
    assert saved.ns >= 0.08e9
    assert "trainer.train()" in saved.site.text
    assert len(callback.step_ns) == 124
    assert "checkpoint" in callback.report.to_text()
    assert "Over the whole run: " in (tmp_path / "reports" / "perfdoctor-step000100.txt").read_text()


def test_a_second_session_is_refused(tmp_path):
    trainer, _ = trainer_of(tmp_path, [PerfDoctorTrainerCallback()])
    with perfdoctor.watch() as session:
        with pytest.raises(SessionError, match="another perfdoctor session"):
            trainer.train()
        assert sessions.running() is session
    with pytest.raises(SessionError, match="2 PerfDoctorTrainerCallbacks in one Trainer"):
        train(tmp_path, [PerfDoctorTrainerCallback(), PerfDoctorTrainerCallback()])


def test_a_callback_added_later_as_a_class(tmp_path):
    trainer, _ = trainer_of(tmp_path, max_steps=50)
    trainer.add_callback(PerfDoctorTrainerCallback)
    trainer.train()
    assert trainer.callback_handler.callbacks[-1].report.step.num_steps == 10


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(UsageError, match="active=0"):
        PerfDoctorTrainerCallback(active=0)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match=r"report_dir=.*file"):
        train(tmp_path, [PerfDoctorTrainerCallback(report_dir=file)])


def test_it_adds_no_sync_on_the_emulated_device(tmp_path):
    counts, kept = [], []
    callback = PerfDoctorTrainerCallback(warmup=2, active=3)
    with perfdoctor.emulate_cuda():
        train(tmp_path, use_cpu=False)  # the first training of a process sets up more than the others
        for callbacks in ([], [callback]):
            with perfdoctor.sync_guard(mode="record") as guard:
                losses, _ = train(tmp_path, callbacks, use_cpu=False)
            kept.append(losses)
            counts.append({(row.kind, row.first_step + row.later_steps) for row in guard.sites})
    assert kept[0] == kept[1]
    assert counts[0] == counts[1]
    rows = [row for row in (*callback.report.findings, *callback.report.leave_alone) if row.site is not None]
    assert any(row.site.library.owner == "transformers" for row in rows)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    expected, _ = train(tmp_path, use_cpu=False, max_steps=120)
    callback = PerfDoctorTrainerCallback()
    losses, trainer = train(tmp_path, [callback], use_cpu=False, max_steps=120)
    assert losses == expected
    assert callback.report.accounting.busy_ns > 0
    # logging_steps=1 reads the loss in every step, inside transformers.
    assert any(finding.code == "host-sync" for finding in (*callback.report.findings, *callback.report.leave_alone))
    line = next(line for line in trainer.state.log_history if "perfdoctor/step_ms" in line)
    assert 0 < line["perfdoctor/busy_ratio"] <= 1
