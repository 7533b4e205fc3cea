"""A training script for two processes over gloo. Arguments: what rank 1 does ('slow' or 'die')."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist


def batches(rank: int) -> Iterator[torch.Tensor]:
    for step in range(60):
        if rank == 1 and sys.argv[1] == "slow":
            time.sleep(0.02)
        if rank == 1 and sys.argv[1] == "die" and step == 6:
            os._exit(3)
        yield torch.randn(8, 16)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches(dist.get_rank()):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    del model  # its reducer would end gloo's thread with the GIL held, for which that thread may wait
    dist.destroy_process_group()


def watched(path: str) -> None:
    import perfdoctor

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ranks = [int(each) for each in sys.argv[3].split(",")] if len(sys.argv) > 3 else None
    with perfdoctor.watch(warmup=2, active=4, profiled=True, ranks=ranks) as session:
        for batch in session.batches(batches(dist.get_rank())):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    if dist.get_rank() == 0:
        with open(path, "w", encoding="utf-8") as file:
            file.write(session.diagnosis().to_json())
    del model  # as above
    dist.destroy_process_group()


if __name__ == "__main__":
    main() if len(sys.argv) < 3 else watched(sys.argv[2])
