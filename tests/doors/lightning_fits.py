"""Small fits of a real Trainer, and what a watched fit touches, for the tests of the Lightning door."""

import csv
import importlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

pl = pytest.importorskip("pytorch_lightning", reason="needs pytorch-lightning")

from perfdoctor.doors import session as sessions  # noqa: E402

# Lightning's advice on how to train, given for every small fit in here.
ADVICE = (
    "ignore:.*does not have many workers",
    "ignore:The number of training batches",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You called `self.log.*have no logger configured",
    "ignore:.*LeafSpec.*:FutureWarning",  # its use of torch's tree API, where torch is newer than this Lightning
)

EXACT = ("prefetch", "deferred-logging", "nan-watch")  # "clip" equals torch's clipping but for rounding


def data(count=80, size=4, shuffle=True):
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(count, 8, generator=generator)), size, shuffle=shuffle)


def net_of(package=pl, **methods):
    """A small module; `methods` replace or add some of its own."""

    class Net(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
            self.losses = []

        def loss_of(self, batch):
            loss = self.layer(batch[0]).square().mean()
            self.losses.append(loss.detach().clone())
            return loss

        def training_step(self, batch, batch_idx):
            loss = self.loss_of(batch)
            self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val", self.layer(batch[0]).mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return type("Net", (Net,), methods)


NET = net_of()


def fit(tmp_path, callbacks=(), model=None, package=pl, loader=None, val=None, ckpt_path=None, **options):
    """(losses, trainer) of a fit from seed 0. Nothing may be left hooked afterwards, whatever it ends with."""
    torch.manual_seed(0)
    options = {
        "max_steps": 30, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path, **options,
    }  # fmt: skip
    module = (model or NET)()
    trainer = package.Trainer(callbacks=list(callbacks), **options)
    before = hooked(trainer)
    try:
        trainer.fit(module, data() if loader is None else loader, val or data(8, shuffle=False), ckpt_path=ckpt_path)
    finally:
        assert hooked(trainer) == before
        assert sessions.running() is None
    return [float(loss) for loss in module.losses], trainer


def hooked(trainer):
    """What a watched fit touches, as it is now."""
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    fetchers = importlib.import_module(type(trainer.fit_loop).__module__.replace("fit_loop", "fetchers"))
    result = importlib.import_module(type(trainer).__module__.replace("trainer.trainer", _RESULT))
    return (
        len(optimizer._global_optimizer_post_hooks), len(optimizer._global_optimizer_pre_hooks),
        dataloader._BaseDataLoaderIter.__next__, dataloader._MultiProcessingDataLoaderIter.__init__,
        fetchers._DataFetcher.__next__, result.convert_tensors_to_scalars, torch.autograd.backward,
        torch.amp.GradScaler.update,
        [sorted(set(vars(part)) & {"start", "stop", "log_metrics", "on_batch_end", "metrics", "clip_grad_by_norm"})
         for part in (trainer.profiler, trainer._logger_connector, trainer.fit_loop.epoch_loop._results,
                      trainer.precision_plugin)],
        torch.save, torch.nn.Module.train, DataLoader.__iter__, sorted({"save_checkpoint"} & set(vars(trainer))),
        sorted({"run"} & set(vars(trainer.fit_loop.epoch_loop.val_loop))),
        sorted({"run"} & set(vars(trainer.fit_loop))),
    )  # fmt: skip


_RESULT = "trainer.connectors.logger_connector.result"


def logged(tmp_path):
    """The lines of a CSVLogger, each without its empty cells."""
    file = next(Path(tmp_path).rglob("metrics.csv"))
    rows = list(csv.DictReader(file.read_text().splitlines()))
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def two_optimizers(self, batch, batch_idx):
    for optimizer in self.optimizers():
        loss = self.loss_of(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def both(self):
    return [torch.optim.SGD(self.layer[0].parameters(), lr=0.05), torch.optim.Adam(self.layer[2].parameters())]


def one_in_five(self, batch, batch_idx):
    """As a GAN: the second optimizer steps in every fifth batch."""
    for optimizer, every in zip(self.optimizers(), (1, 5), strict=True):
        if batch_idx % every == 0:
            loss = self.loss_of(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.1)
            optimizer.step()


def lbfgs(self):
    return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(400.0).view(50, 8) / 400)


class Rows:
    """A loader that is no DataLoader."""

    def __len__(self):
        return 9

    def __iter__(self):
        return iter([[torch.full((4, 8), i / 9)] for i in range(9)])


MANUAL = {"training_step": two_optimizers, "configure_optimizers": both, "automatic_optimization": False}
FITS = {
    "clipped": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 3, "max_steps": 20},
    # More than the batches after which an optimizer is taken to be out of the hooks' reach.
    "accumulated for long": {"accumulate_grad_batches": 20, "max_steps": 14, "loader": data(400)},
    "manual, two optimizers": {"model": net_of(**MANUAL), "max_steps": 60},
    "manual, one of two optimizers": {"model": net_of(**MANUAL | {"training_step": one_in_five}), "max_steps": 60},
    "a closure": {"model": net_of(configure_optimizers=lbfgs)},
    "validated inside": {"val": data(8, shuffle=False), "val_check_interval": 7, "num_sanity_val_steps": 2},
    "limited": {"limit_train_batches": 6},
    "bfloat16": {"precision": "bf16-mixed"},
    "bfloat16 throughout": {"precision": "bf16-true"},
    "double": {"precision": "64-true"},
    "endless": {"loader": DataLoader(Stream(), 2)},
    "a loader of its own": {"loader": Rows()},
    "two loaders": {"loader": {"a": data(), "b": data(40)},
                    "model": net_of(training_step=lambda self, batch, i: self.loss_of(batch["a"]))},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1},
    "a profiler": {"profiler": "simple"},
}  # fmt: skip


def syncs_of(guard):
    """By kind. Not by line: the callback lets more of them be charged to the line of `self.log`."""
    found = Counter()
    for row in guard.sites:
        found[row.kind] += row.first_step + row.later_steps
    return found
