"""Treatments inside a real Trainer, and the proof that neither they nor the callback wait for the device."""

import pytest
import torch
from lightning_fits import ADVICE, EXACT, Rows, data, fit, logged, net_of, pl, syncs_of

import perfdoctor
from perfdoctor.doors.lightning import PerfDoctorCallback
from perfdoctor.errors import NonFiniteError, TreatmentRefused

pytestmark = [pytest.mark.filterwarnings(each) for each in ADVICE]


def test_our_clip_clips(tmp_path):
    calls = []

    def on_before_zero_grad(self, optimizer):
        calls.append([p.grad.norm().item() for p in self.parameters() if p.grad is not None])

    model = net_of(on_before_zero_grad=on_before_zero_grad)
    options = {"gradient_clip_val": 0.01, "accelerator": "gpu", "model": model, "max_steps": 12}
    with perfdoctor.emulate_cuda():
        expected, _ = fit(tmp_path, **options)
        theirs, calls = calls, []
        losses, _ = fit(tmp_path, [PerfDoctorCallback(treatments=("clip",))], **options)
    assert losses == pytest.approx(expected, rel=1e-5)
    for ours, torchs in zip(calls[1:], theirs[1:], strict=True):
        assert ours == pytest.approx(torchs, rel=1e-4)
        assert sum(norm**2 for norm in ours) ** 0.5 == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("windows", [None, 15])
def test_it_adds_no_sync(windows, tmp_path):
    options = {
        "accelerator": "gpu", "enable_progress_bar": True, "logger": pl.loggers.CSVLogger(tmp_path),
        "log_every_n_steps": 5, "gradient_clip_val": 1.0, "max_steps": 40,
    }  # fmt: skip
    model = net_of()
    with perfdoctor.emulate_cuda():
        with perfdoctor.sync_guard(mode="record") as bare:
            fit(tmp_path, model=model, **options)
        with perfdoctor.sync_guard(mode="record") as watched:
            callback = PerfDoctorCallback(warmup=2, active=3, every_n_steps=windows)
            fit(tmp_path, [callback], model, **options)
        with perfdoctor.sync_guard(mode="record") as treated:
            fit(tmp_path, [PerfDoctorCallback(treatments=(*EXACT, "clip"))], model, **options)
    assert syncs_of(watched) == syncs_of(bare)
    # The bar's reads and the batches' copies of 40 steps are gone.
    assert syncs_of(treated).total() < syncs_of(bare).total() - 2 * 40 + 10


def test_a_treated_step_has_no_sync_at_all(tmp_path):
    guard = perfdoctor.sync_guard(budget=0)
    seen = []

    class Guarding(pl.Callback):
        """From the first batch of the first epoch to its last."""

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 2:
                guard.__enter__()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(batch[0].is_cuda)
            if batch_idx == 18:
                guard.__exit__(None, None, None)

    callbacks = [Guarding(), PerfDoctorCallback(warmup=2, active=3, treatments=(*EXACT, "clip"))]
    with perfdoctor.emulate_cuda():
        fit(
            tmp_path, callbacks, accelerator="gpu", enable_progress_bar=True, max_steps=20, log_every_n_steps=2,
            logger=pl.loggers.CSVLogger(tmp_path), gradient_clip_val=1.0,
        )  # fmt: skip
    assert seen == [True] * 20
    assert not guard.sites
    assert guard.num_steps == 1


def test_deferred_lines_are_those_of_lightning(tmp_path):
    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        if batch_idx % 2:
            self.log("odd", loss * 2)
        self.log("index", float(batch_idx), prog_bar=True)
        return loss

    model = net_of(training_step=training_step)
    options = {"accelerator": "gpu", "log_every_n_steps": 3, "max_steps": 50, "enable_progress_bar": True}
    found = []
    for name, callbacks in (("bare", []), ("deferred", [PerfDoctorCallback(treatments="deferred-logging")])):
        folder = tmp_path / name
        with perfdoctor.emulate_cuda():
            _, trainer = fit(tmp_path, callbacks, model, logger=pl.loggers.CSVLogger(folder), **options)
        lines = [line for line in logged(folder) if not any(key.startswith("perfdoctor") for key in line)]
        found.append((lines, {key: float(value) for key, value in trainer.callback_metrics.items()}))
    assert found[0] == found[1]
    assert len(found[0][0]) > 16


def test_prefetch_refuses_what_needs_the_batch_on_the_host(tmp_path):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 1]

    class Stateful(Rows):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    callback = PerfDoctorCallback(treatments="prefetch")
    with perfdoctor.emulate_cuda():
        with pytest.raises(TreatmentRefused, match="overrides on_before_batch_transfer"):
            fit(tmp_path, [callback], net_of(on_before_batch_transfer=on_before_batch_transfer), accelerator="gpu")
        with pytest.raises(TreatmentRefused, match="state_dict"):
            fit(tmp_path, [callback], loader=Stateful(), accelerator="gpu")


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_gone_bad_ends_the_fit(scaled, tmp_path):
    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        return loss * float("inf") if len(self.losses) == 7 else loss

    callback = PerfDoctorCallback(treatments="nan-watch")
    options = {"precision": "16-mixed"} if scaled else {}
    with perfdoctor.emulate_cuda(), pytest.raises(NonFiniteError, match="step 7: the loss is not finite"):
        fit(tmp_path, [callback], net_of(training_step=training_step), accelerator="gpu", **options)
    with pytest.raises(NonFiniteError, match="step 7"):  # the last step of a fit, on the CPU
        fit(tmp_path, [PerfDoctorCallback(treatments="nan-watch")], net_of(training_step=training_step), max_steps=7)


@pytest.mark.parametrize("clipped", [None, 1.0])
def test_a_gradient_gone_bad_ends_the_fit(clipped, tmp_path):
    def on_after_backward(self):
        if len(self.losses) == 7:
            self.layer[2].weight.grad[0, 1] = float("nan")

    callback = PerfDoctorCallback(treatments=("nan-watch", "clip"))
    model = net_of(on_after_backward=on_after_backward)
    said = (
        r"step 7: the gradient of layer\.2\.weight: 1 value is not finite"
        if clipped is None
        else "step 7: the gradient"
    )
    with perfdoctor.emulate_cuda(), pytest.raises(NonFiniteError, match=said):
        fit(tmp_path, [callback], model, accelerator="gpu", gradient_clip_val=clipped)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    torch.zeros(1, device="cuda")  # a guard sees nothing of a CUDA context that is made inside it
    options = {
        "accelerator": "gpu", "enable_progress_bar": True, "log_every_n_steps": 10, "max_steps": 200,
        "loader": data(800),
    }  # fmt: skip
    counts, kept = [], []
    for callbacks in ([], [PerfDoctorCallback(warmup=5, active=10)], [PerfDoctorCallback(treatments=EXACT)]):
        folder = tmp_path / str(len(kept))
        with perfdoctor.sync_guard(mode="record") as guard:
            losses, _ = fit(tmp_path, callbacks, logger=pl.loggers.CSVLogger(folder), **options)
        kept.append(losses)
        counts.append(syncs_of(guard).total())
        ours = [str(row) for row in guard.sites if row.site.owner == "perfdoctor"]
        assert not ours
    assert kept[0] == kept[1] == kept[2]
    assert counts[1] <= counts[0] + 2  # garbage collections and lazy initialisation are not the callback's
    assert counts[2] < counts[0] - 300  # the bar's reads and the batches' copies of 200 steps
    report = callbacks[0].report
    assert report.accounting.busy_ns > 0
    line = next(line for line in logged(tmp_path / "1") if "perfdoctor/step_ms" in line)
    assert 0 < line["perfdoctor/busy_ratio"] <= 1
    assert "perfdoctor/idle_ms/unexplained" in line
