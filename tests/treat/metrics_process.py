"""One rank of `test_two_ranks`: metrics_process.py RANK FOLDER. Prints what it read, as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys

import torch
import torchmetrics

from perfdoctor.treat.device_metrics import DeviceMetrics
from perfdoctor.treat.metric_readings import Reading


def as_dict(reading: Reading) -> dict[str, dict[str, float]]:
    return {name: dataclasses.asdict(value) for name, value in reading.statistics.items()}


def main(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    accuracy = torchmetrics.classification.BinaryAccuracy()
    metrics = DeviceMetrics()
    if rank == 0:
        accuracy.update(torch.tensor([1, 0]), torch.tensor([1, 1]))
        metrics.update(loss=torch.tensor(1.0), weight=1)
        metrics.update(loss=torch.tensor(2.0), acc=1.0, accuracy=accuracy, weight=3)
        metrics.update(only=5.0)
    else:
        accuracy.update(torch.tensor([1, 0, 1, 1]), torch.tensor([1, 1, 1, 1]))
        metrics.update(acc=0.0, loss=torch.tensor(10.0), accuracy=accuracy, weight=4)
    alone = as_dict(metrics.read(across_ranks=False))
    print(json.dumps({"all": as_dict(metrics.read()), "alone": alone}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
