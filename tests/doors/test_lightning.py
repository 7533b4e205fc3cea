"""A real Trainer, of both names of Lightning, watched by PerfDoctorCallback."""

import copy
import json
import os
import pickle
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lightning_fits import ADVICE, EXACT, FITS, NET, data, fit, hooked, logged, net_of, pl, sessions

import perfdoctor
from perfdoctor.doors.lightning import PerfDoctorCallback
from perfdoctor.errors import SessionError, UsageError

pytestmark = [pytest.mark.filterwarnings(each) for each in ADVICE]


@pytest.mark.parametrize("name", ["pytorch_lightning", "lightning.pytorch"])
def test_a_fit_is_watched_and_reported(name, tmp_path, capsys):
    package = pytest.importorskip(name, reason=f"needs {name}")
    model = net_of(package)
    expected, _ = fit(tmp_path / "bare", model=model, package=package)
    callback = PerfDoctorCallback(warmup=3, active=4, report_dir=tmp_path / "reports")
    assert isinstance(callback, package.Callback)
    assert isinstance(callback, PerfDoctorCallback)
    logger = package.loggers.CSVLogger(tmp_path)
    losses, trainer = fit(tmp_path, [callback], model, package, logger=logger)
    assert losses == expected
    assert len(losses) == 30
    assert callback.report.step.num_steps == 4
    assert capsys.readouterr().out.count("perfdoctor: session on") == 1
    text = (tmp_path / "reports" / "perfdoctor.txt").read_text()
    assert text.startswith("perfdoctor: session on")
    document = json.loads((tmp_path / "reports" / "perfdoctor.json").read_text())
    assert document["verdict"]["step"]["num_steps"] == 4
    assert sorted(path.name for path in (tmp_path / "reports").iterdir()) == ["perfdoctor.json", "perfdoctor.txt"]
    line = logged(tmp_path)[-1]
    assert line["perfdoctor/step_ms"] == pytest.approx(document["verdict"]["step"]["median_ms"], abs=0.001)
    assert line["perfdoctor/data_wait_ms"] > 0
    assert line["step"] == 30
    assert trainer.state.finished


def test_importing_costs_no_lightning():
    code = (
        "import sys, perfdoctor, perfdoctor.doors.lightning\n"
        "assert not {'lightning', 'pytorch_lightning', 'lightning_fabric'} & set(sys.modules)\n"
        "callback = perfdoctor.doors.lightning.PerfDoctorCallback()\n"
        "import pytorch_lightning\n"
        "assert isinstance(callback, pytorch_lightning.Callback)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_syncs_are_found_with_their_owners(tmp_path):
    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("loss", loss, prog_bar=True)
        self.seen = loss.item()
        return loss

    first = training_step.__code__.co_firstlineno
    callback = PerfDoctorCallback(warmup=3, active=5)
    with perfdoctor.emulate_cuda():
        fit(tmp_path, [callback], net_of(training_step=training_step), accelerator="gpu", enable_progress_bar=True)
    report = callback.report
    here = {
        finding.site.frame.line - first: finding
        for finding in (*report.findings, *report.leave_alone)
        if finding.code == "host-sync" and finding.site.frame.file == __file__
    }
    assert here[3].count == pytest.approx(1.0)  # the step's own read
    assert here[2].count >= 1.0  # what the progress bar reads of self.log
    assert "logger" in here[2].title


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_losses_stay_to_the_bit(name, device, tmp_path):
    callback = PerfDoctorCallback(warmup=2, active=3, treatments=(*EXACT, "clip") if device == "cpu" else EXACT)
    with perfdoctor.emulate_cuda() if device == "emulated" else nullcontext():
        options = {**FITS[name], "accelerator": "gpu" if device == "emulated" else "cpu"}
        expected, _ = fit(tmp_path, **options)
        losses, _ = fit(tmp_path, [callback], **options)
    assert losses == expected
    assert callback.report.step.num_steps == 3
    if name.startswith("accumulated"):
        assert callback.report.micro_batches == options["accumulate_grad_batches"]
    if name == "a loader of its own":
        assert callback.report.samples_per_s > 0  # its batches were seen


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before")  # the first update is skipped on purpose
def test_a_gradient_scaler_and_its_skipped_updates(tmp_path):
    with perfdoctor.emulate_cuda():
        options = {"precision": "16-mixed", "accelerator": "gpu"}
        expected, _ = fit(tmp_path, **options)
        callback = PerfDoctorCallback(warmup=2, active=3, treatments=EXACT)
        losses, _ = fit(tmp_path, [callback], **options)
    assert losses == expected
    assert callback.report.step.num_steps == 3


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_fast_dev_run_is_too_short_and_says_so(device, tmp_path):
    callback = PerfDoctorCallback(report_dir=tmp_path, treatments=EXACT)
    with perfdoctor.emulate_cuda() if device == "emulated" else nullcontext():
        fit(tmp_path, [callback], fast_dev_run=2, accelerator="gpu" if device == "emulated" else "cpu")
    assert any(note.code == "stopped-early" for note in callback.report.notes)
    assert (tmp_path / "perfdoctor.txt").exists()


def test_training_is_resumed_from_a_checkpoint(tmp_path):
    whole, _ = fit(tmp_path, max_epochs=3, max_steps=-1)
    options = {"max_steps": -1, "enable_checkpointing": True}
    callback = PerfDoctorCallback(warmup=2, active=3)
    first, trainer = fit(tmp_path, [callback], max_epochs=1, **options)
    torch.manual_seed(1)
    resumed = PerfDoctorCallback(warmup=2, active=3)
    rest, again = fit(
        tmp_path, [resumed], max_epochs=3, ckpt_path=trainer.checkpoint_callback.best_model_path, **options
    )
    assert again.global_step == 60
    assert first == whole[:20]
    assert len(rest) == 40
    assert resumed.report.step.num_steps == 3


def test_an_evaluation_of_its_own_is_not_watched(tmp_path):
    callback = PerfDoctorCallback(warmup=2, active=3, every_n_steps=25)
    _, trainer = fit(tmp_path, [callback])
    report, before = callback.report, hooked(trainer)
    trainer.validate(NET(), data(8, shuffle=False), verbose=False)
    assert hooked(trainer) == before
    assert callback.report is report


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_training_is_resumed_in_the_middle_of_an_epoch(tmp_path):
    keep = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=27, save_top_k=-1)
    options = {"enable_checkpointing": True, "max_steps": 60, "loader": data(shuffle=False)}
    fit(tmp_path, [keep], **options)
    (path,) = (path for path in (tmp_path / "kept").iterdir() if "step=27" in path.name)
    callback = PerfDoctorCallback(warmup=2, active=3, report_dir=tmp_path / "reports", every_n_steps=30)
    expected, _ = fit(tmp_path, [copy.deepcopy(keep)], ckpt_path=path, **options)
    rest, trainer = fit(tmp_path, [copy.deepcopy(keep), callback], ckpt_path=path, **options)
    assert trainer.global_step == 60
    assert rest == expected
    names = sorted(path.name for path in (tmp_path / "reports").glob("*.txt"))
    # By the count of Lightning's log lines, which a checkpoint written at the end of a batch holds one behind.
    assert names == ["perfdoctor-step000026.txt", "perfdoctor-step000056.txt"]
    assert len(callback.step_ns) == 32


def test_another_window_every_n_steps(tmp_path, capsys):
    logger = pl.loggers.CSVLogger(tmp_path)
    callback = PerfDoctorCallback(warmup=2, active=3, every_n_steps=25, report_dir=tmp_path / "reports")
    fit(tmp_path, [callback], max_steps=70, logger=logger)
    names = sorted(path.name for path in (tmp_path / "reports").glob("*.txt"))
    assert names == ["perfdoctor-step000000.txt", "perfdoctor-step000025.txt", "perfdoctor-step000050.txt"]
    steps = [line["step"] for line in logged(tmp_path) if "perfdoctor/step_ms" in line]
    assert len(steps) == 3
    # A window takes at least 2 + 3 + 1 + 3 steps, and is read at the first batch after it.
    assert all(start + 9 <= step < start + 25 for step, start in zip(steps, (0, 25, 50), strict=True))
    assert capsys.readouterr().out.count("perfdoctor: session on") == 1  # printed once, at the end


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_is_passed_on_with_a_report(error, tmp_path, capsys):
    def training_step(self, batch, batch_idx):
        if len(self.losses) == 17:
            raise error("the user's own")
        return self.loss_of(batch)

    callback = PerfDoctorCallback(warmup=2, active=3, report_dir=tmp_path, treatments=EXACT)
    # Lightning turns the interrupt into an exit.
    with perfdoctor.emulate_cuda(), pytest.raises(SystemExit if error is KeyboardInterrupt else ValueError):
        fit(tmp_path, [callback], net_of(training_step=training_step), accelerator="gpu")
    assert callback.report.step.num_steps == 3
    assert (tmp_path / "perfdoctor.txt").exists()
    assert capsys.readouterr().out.count("perfdoctor: session on") == 1
    fit(tmp_path, [callback])  # and it can be used again


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_end", "on_train_end", "on_fit_end"])
def test_nothing_stays_hooked_where_a_hook_fails(hook, tmp_path):
    def failing(self):
        raise ValueError(hook)

    callback = PerfDoctorCallback(warmup=2, active=3, treatments=EXACT)
    with perfdoctor.emulate_cuda(), pytest.raises(ValueError, match=hook):
        fit(tmp_path, [callback], net_of(**{hook: failing}), accelerator="gpu", max_epochs=1)


def test_a_second_session_is_refused(tmp_path):
    trainer = pl.Trainer(
        callbacks=[PerfDoctorCallback()], accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1,
        default_root_dir=tmp_path,
    )  # fmt: skip
    before = hooked(trainer)
    with perfdoctor.watch() as session:
        with pytest.raises(SessionError, match="another perfdoctor session"):
            trainer.fit(NET(), data(), data(8, shuffle=False))
        assert sessions.running() is session
    assert hooked(trainer) == before
    with pytest.raises(SessionError, match="2 PerfDoctorCallbacks in one Trainer"):
        fit(tmp_path, [PerfDoctorCallback(), PerfDoctorCallback()])


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no 'warp' in a Trainer.*prefetch, deferred-logging, clip, nan-watch"):
        PerfDoctorCallback(treatments=("prefetch", "warp"))
    with pytest.raises(UsageError, match="every_n_steps=0"):
        PerfDoctorCallback(every_n_steps=0)
    with pytest.raises(UsageError, match=r"warmup=True"):
        PerfDoctorCallback(warmup=True)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match=r"report_dir=.*file"):
        fit(tmp_path, [PerfDoctorCallback(report_dir=file)])


def test_other_entry_points_are_left_alone(tmp_path):
    callback = PerfDoctorCallback(report_dir=tmp_path / "reports")
    _, trainer = fit(tmp_path, [callback], max_steps=3)
    callback = PerfDoctorCallback(report_dir=tmp_path / "none")
    trainer.callbacks = [callback]
    trainer.validate(trainer.model, data(8, shuffle=False))
    assert callback.report is None
    assert not (tmp_path / "none").exists()


def test_it_can_be_copied_pickled_and_subclassed():
    class Mine(PerfDoctorCallback):
        def on_train_end(self, trainer, pl_module):
            super().on_train_end(trainer, pl_module)

    mine = Mine(warmup=7)
    assert isinstance(mine, (Mine, pl.Callback))
    assert copy.deepcopy(mine).options.warmup == 7
    again = pickle.loads(pickle.dumps(PerfDoctorCallback(active=3)))
    assert isinstance(again, pl.Callback)
    assert again.options.active == 3


def test_every_hook_is_a_range(tmp_path):
    callback = PerfDoctorCallback(warmup=2, active=3)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        fit(tmp_path, [callback], max_steps=12, gradient_clip_val=1.0, val_check_interval=3)
    names = {event.key for event in profile.key_averages()}
    assert {"data", "h2d", "forward", "backward", "zero_grad", "clip", "validation"} <= names
    assert {"Net.optimizer_step", "Net.on_train_batch_end", "run_training_batch"} <= names


def test_a_session_of_the_users_in_the_middle(tmp_path):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 22:
            self.session = perfdoctor.watch().__enter__()
        if self.trainer.global_step == 40:
            self.session.__exit__(None, None, None)
        return self.loss_of(batch)

    callback = PerfDoctorCallback(warmup=2, active=3, every_n_steps=25, report_dir=tmp_path)
    fit(tmp_path, [callback], net_of(training_step=training_step), max_steps=60)
    # The second window waits until theirs is over.
    assert sorted(path.name for path in tmp_path.glob("perfdoctor*.txt")) == [
        "perfdoctor-step000000.txt", "perfdoctor-step000041.txt",
    ]  # fmt: skip


def test_a_report_that_cannot_be_written_stops_no_training(tmp_path, caplog):
    def on_train_start(self):
        (tmp_path / "reports").rmdir()
        (tmp_path / "reports").write_text("in the way")

    callback = PerfDoctorCallback(warmup=2, active=3, report_dir=tmp_path / "reports")
    losses, trainer = fit(tmp_path, [callback], net_of(on_train_start=on_train_start))
    assert len(losses) == 30
    assert trainer.state.finished
    assert "could not report the window that began at step 0" in caplog.text


SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
from lightning_fits import data, net_of, pl
from perfdoctor.doors.lightning import PerfDoctorCallback

def training_step(self, batch, batch_idx):
    loss = self.loss_of(batch)
    self.log("loss", loss, sync_dist=True)
    return loss

callback = PerfDoctorCallback(warmup=2, active=3, report_dir=sys.argv[1])
trainer = pl.Trainer(
    max_steps=30, accelerator="cpu", devices=2, strategy="ddp", callbacks=[callback], logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1],
)
trainer.fit(net_of(training_step=training_step)(), data(200), data(8, shuffle=False))
"""


def run_script(file, *arguments):
    """The standard output of a script that may import what this test imports."""
    here = Path(__file__).resolve()
    path = os.pathsep.join([str(here.parents[2]), str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(file), *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_ranks_and_one_page(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = run_script(tmp_path / "script.py", tmp_path / "reports")
    assert printed.count("perfdoctor: session on") == 1
    names = sorted(path.name for path in (tmp_path / "reports").glob("perfdoctor*.json"))
    assert names == ["perfdoctor-rank1.json", "perfdoctor.json"]
    document = json.loads((tmp_path / "reports" / "perfdoctor.json").read_text())
    assert [row["rank"] for row in document["ranks"]] == [0, 1]
    # `sync_dist=True` is named as what makes the host wait, at the line of the user's that asked for it.
    (found,) = [row for row in document["findings"] + document["leave_alone"] if row["kind"] == "sync_dist"]
    assert found["code"] == "host-sync"
    assert "sync_dist=True" in found["title"]
    assert found["count"] == pytest.approx(1.0)
    assert found["site"]["text"] == 'self.log("loss", loss, sync_dist=True)'
    assert "inside lightning" in printed
    assert "self.log with sync_dist=True waits at a barrier" in printed


@pytest.mark.parametrize("treat", [False, True])
def test_the_example_tells_what_ails_it(treat, tmp_path):
    file = Path(__file__).resolve().parents[2] / "examples" / "lightning_loop.py"
    options = ["--size", "small", "--steps", 30, "--warmup", 3, "--active", 4, "--report-dir", tmp_path]
    assert "perfdoctor: session on" in run_script(file, *options, *(["--treat"] if treat else []))
    document = json.loads((tmp_path / "perfdoctor.json").read_text())
    found = {
        (row["code"], row["site"]["text"]) for row in document["findings"] + document["leave_alone"] if row["site"]
    }
    assert ("host-sync", "self.best = max(self.best, accuracy.item())") in found
    assert ("host-sync", "logits = self.body(pictures)[known]") in found
    logged = ("host-sync", 'self.log_dict({"loss": loss, "accuracy": accuracy}, prog_bar=True)')
    assert (logged in found) is not treat
    assert any(code == "pageable-copy" for code, _ in found) is not treat


def test_an_evaluation_is_no_part_of_a_step(tmp_path):
    def validation_step(self, batch, batch_idx):
        time.sleep(0.2)

    callback = PerfDoctorCallback(warmup=2, active=9)
    model = net_of(validation_step=validation_step)
    before = time.monotonic()
    fit(tmp_path, [callback], model, val_check_interval=2, limit_val_batches=1, max_steps=40)
    assert time.monotonic() - before > 20 * 0.2
    # One step in two has an evaluation before it: counted in, it would be in the upper quartile.
    assert callback.report.step.num_steps == 9
    assert callback.report.step.high_ns < 200e6
