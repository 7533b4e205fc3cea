"""A small convolutional network in Lightning, slow on purpose, and PerfDoctorCallback to say why.

python examples/lightning_loop.py                       # the report; without a GPU on an emulated one
python examples/lightning_loop.py --treat               # the same fit with the treatments that need no change of code
"""

import argparse
from contextlib import nullcontext

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import perfdoctor

SIZES = {"small": (8, 16, 16), "large": (64, 64, 128)}  # width, pixels, images a batch
CLASSES = 10


class Images(Dataset):
    """Random pictures, normalised one by one when they are asked for."""

    def __init__(self, count, pixels):
        generator = torch.Generator().manual_seed(0)
        self.pictures = torch.randint(0, 256, (count, 3, pixels, pixels), dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(-1, CLASSES, (count,), generator=generator)  # -1: nobody knows

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        picture = self.pictures[index].float()
        return (picture - picture.mean()) / picture.std(), self.labels[index]


class Net(pl.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES),
        )  # fmt: skip
        self.best = 0.0

    def training_step(self, batch, batch_idx):
        pictures, labels = batch
        known = labels >= 0
        logits = self.body(pictures)[known]
        loss = F.cross_entropy(logits, labels[known])
        accuracy = (logits.argmax(1) == labels[known]).float().mean()
        self.best = max(self.best, accuracy.item())
        self.log_dict({"loss": loss, "accuracy": accuracy}, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        pictures, labels = batch
        self.log("val_loss", F.cross_entropy(self.body(pictures), labels.clamp(min=0)))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(options):
    pl.seed_everything(0)
    width, pixels, batch = SIZES[options.size]
    callback = perfdoctor.PerfDoctorCallback(
        warmup=options.warmup,
        active=options.active,
        report_dir=options.report_dir,
        treatments=("prefetch", "deferred-logging", "clip", "nan-watch") if options.treat else (),
    )
    trainer = pl.Trainer(
        max_steps=options.steps, accelerator="gpu", devices=1, callbacks=[callback], gradient_clip_val=1.0,
        logger=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(Images(40 * batch, pixels), batch, shuffle=True, drop_last=True)
    trainer.fit(Net(width), loader, DataLoader(Images(batch, pixels), batch))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--active", type=int, default=10)
    parser.add_argument("--size", choices=SIZES, default="large" if torch.cuda.is_available() else "small")
    parser.add_argument("--report-dir", help="a folder for the report as text and JSON")
    parser.add_argument("--treat", action="store_true")
    with nullcontext() if torch.cuda.is_available() else perfdoctor.emulate_cuda():
        fit(parser.parse_args())


if __name__ == "__main__":
    main()
