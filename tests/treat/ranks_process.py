"""One rank of test_device_metrics_ranks.py: ranks_process.py RANK FOLDER CASE. Prints what it read, as JSON."""

from __future__ import annotations

import datetime
import json
import sys
import warnings

import torch
import torchmetrics

from perfdoctor.errors import UsageError
from perfdoctor.treat.device_metrics import DeviceMetrics


def order(rank: int, metrics: DeviceMetrics) -> None:
    """Two objects of one kind, first passed in another order on each rank."""
    means = {name: torchmetrics.MeanMetric() for name in ("a", "b")}
    means["a"].update(1.0 + rank)
    means["b"].update(10.0 + rank)
    for name in ("a", "b") if rank == 0 else ("b", "a"):
        metrics.update({name: means[name]})


def idle(rank: int, metrics: DeviceMetrics) -> None:
    """Rank 1 has no value yet."""
    mean = torchmetrics.MeanMetric()
    if rank == 0:
        mean.update(3.0)
    metrics.update(mean=mean)


def lists(rank: int, metrics: DeviceMetrics) -> None:
    """Rank 1 has no value yet in an object that keeps all of them."""
    values = torchmetrics.CatMetric()
    if rank == 0:
        values.update(3.0)
    metrics.update(values=values, loss=1.0)


def later(rank: int, metrics: DeviceMetrics) -> None:
    """Rank 1 has nothing new since a read."""
    mean = torchmetrics.MeanMetric()
    mean.update(1.0 + rank)
    metrics.update(mean=mean)
    metrics.read()
    if rank == 0:
        mean.update(9.0)
        metrics.update(mean=mean)


def lacking(rank: int, metrics: DeviceMetrics) -> None:
    """Rank 1 never passed it."""
    mean = torchmetrics.MeanMetric()
    mean.update(3.0)
    if rank == 0:
        metrics.update(mean=mean, loss=1.0)


def nothing(rank: int, metrics: DeviceMetrics) -> None:
    """Rank 1 never called update."""
    if rank == 0:
        metrics.update(loss=2.0)


def main(rank: int, folder: str, case: str) -> None:
    warnings.simplefilter("error")
    wait = datetime.timedelta(seconds=60)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=wait
    )
    metrics = DeviceMetrics()
    cases = {each.__name__: each for each in (order, idle, lists, later, lacking, nothing)}
    cases[case](rank, metrics)
    try:
        print(json.dumps(dict(metrics.read())))
    except UsageError as error:
        print(json.dumps({"error": str(error), "alone": dict(metrics.read(across_ranks=False))}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
