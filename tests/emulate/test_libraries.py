"""Libraries that pick "cuda" by themselves run on the emulated device, and their reads are named."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfdoctor.emulate import emulate_cuda
from perfdoctor.emulate.tensor import plain


def test_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    with emulate_cuda() as device:
        metric = torchmetrics.MeanMetric().to("cuda")
        accuracy = torchmetrics.classification.MulticlassAccuracy(3, validate_args=False).to("cuda")
        before = len(device.log.hits)
        metric.update(torch.ones(3, device="cuda"))
        accuracy.update(
            torch.zeros(4, dtype=torch.int64, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
        )
        kinds = {hit.kind for hit in device.log.hits[before:]}
        assert metric.compute().is_cuda
        assert metric.compute().item() == 1
        assert "item" not in kinds
        assert metric.device.type == "cuda"


def test_what_torchmetrics_asks_torch_for_is_torchmetrics_doing() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    with emulate_cuda() as device:
        labels = torch.zeros(4, dtype=torch.int64, device="cuda")
        accuracy = torchmetrics.classification.MulticlassAccuracy(3).to("cuda")  # asks for the unique labels
        before = len(device.log.hits)
        accuracy.update(labels, labels)
        assert {hit.kind for hit in device.log.hits[before:]} == {"torchmetrics"}
        before = len(device.log.hits)
        torch.unique(labels)
        assert {hit.kind for hit in device.log.hits[before:]} == {"unique"}


def test_a_scheduler_that_is_given_a_metric_reads_it() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with emulate_cuda() as device:
        scheduler.step(torch.ones((), device="cuda"))  # a device tensor
        (hit,) = device.log.hits
        site = device.log.sites.sites[hit.site]
        assert hit.kind == "item"
        assert site.text.endswith("# a device tensor")
        assert site.library is not None
        assert site.library.file.endswith("lr_scheduler.py")


def test_transformers_model_from_a_config() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16)

    def loss_and_gradient(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).to(device)
        ids = torch.arange(8, device=device)[None]
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
        out.loss.backward()
        assert model.lm_head.weight is model.transformer.wte.weight
        return [out.loss.detach(), model.transformer.wte.weight.grad]

    host = loss_and_gradient("cpu")
    with emulate_cuda():
        device = loss_and_gradient("cuda")
    for one, other in zip(host, device, strict=True):
        assert torch.equal(one, plain(other))


def test_lightning_trainer_on_a_gpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl = pytest.importorskip("pytorch_lightning")

        class Net(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 2)

            def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
                assert batch[0].is_cuda
                loss = F.cross_entropy(self.layer(batch[0]), batch[1])
                self.log("loss", loss, prog_bar=True)
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), 0.1)

        data = TensorDataset(torch.randn(12, 4), torch.randint(0, 2, (12,)))
        with emulate_cuda() as device:
            trainer = pl.Trainer(
                max_steps=6, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(Net(), DataLoader(data, batch_size=2))
    sites = [device.log.sites.sites[hit.site] for hit in device.log.hits if hit.kind == "logging"]
    # The first read is seen inside trainer.fit; from then on the lines of self.log are known.
    assert sum("self.log(" in site.text for site in sites) == 5
    assert sum("trainer.fit(" in site.text and site.owner == "lightning" for site in sites) >= 1


def test_distributed_data_parallel_in_one_process() -> None:
    def train(device: str) -> tuple[list[torch.Tensor], list[str]]:
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device),
            device_ids=[0] if device == "cuda" else None,
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(3, 4, device=device)).square().sum().backward()
            optimizer.step()
        mean = model.module[0].weight.detach().clone()
        dist.all_reduce(mean)
        return [mean, *(parameter.detach() for parameter in model.parameters())], [
            p.device.type for p in model.parameters()
        ]

    def run(device: str) -> tuple[list[torch.Tensor], list[str]]:
        torch.manual_seed(0)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            return train(device)  # of its own: DDP's reducer must go before the group
        finally:
            # A reducer that outlives this call ends gloo's thread with the GIL held; where that thread just then
            # wants the GIL, to free a tensor, both wait for ever (torch 2.13: within 800 runs of this test).
            dist.destroy_process_group()

    host, _ = run("cpu")
    with emulate_cuda() as emulated:
        device, where = run("cuda")
        assert {hit.kind for hit in emulated.log.hits} <= {"h2d_pageable"}
    assert set(where) == {"cuda"}
    for one, other in zip(host, device, strict=True):
        assert torch.equal(one, plain(other))
