"""A real Trainer of transformers, with a tiny model from a config, watched by PerfDoctorTrainerCallback."""

import json
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")
accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

import perfdoctor  # noqa: E402
from perfdoctor.doors import session as sessions  # noqa: E402
from perfdoctor.doors.huggingface import PerfDoctorTrainerCallback  # noqa: E402
from perfdoctor.errors import SessionError, UsageError  # noqa: E402

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


def trainer_of(tmp_path, callbacks=(), **options):
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2, attn_implementation="eager"
    )
    torch.manual_seed(0)
    options = {"max_steps": 30, "use_cpu": True, **options}
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=4, dataloader_pin_memory=False, seed=3, **options,
    )  # fmt: skip
    losses = Losses()
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(config), arguments, train_dataset=Rows(), callbacks=[losses, *callbacks]
    )
    return trainer, losses.values


def hooked(trainer):
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    return (
        len(optimizer._global_optimizer_post_hooks), len(optimizer._global_optimizer_pre_hooks),
        dataloader._BaseDataLoaderIter.__next__, torch.autograd.backward, sorted(vars(trainer.callback_handler)),
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
