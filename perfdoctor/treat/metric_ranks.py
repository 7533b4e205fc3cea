"""The metrics of all ranks in one."""

from __future__ import annotations

from typing import Any

import torch

from perfdoctor.treat.metric_inputs import computed_together, part_of
from perfdoctor.treat.metric_readings import combined


def over_ranks(
    rows: dict[str, list[float]], deferred: dict[str, Any], group: Any
) -> tuple[dict[str, list[float]], list[str]]:
    """Rows of all ranks in one, and the names of the torchmetrics objects that all of them compute, in one order: each
    `compute` is a collective, and in another order on another rank it would mix up two metrics, or wait for ever."""
    mine = (rows, {name: part_of(metric) for name, metric in deferred.items()})
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, mine, group=group)
    return combined([rows for rows, _ in gathered]), computed_together([parts for _, parts in gathered])
