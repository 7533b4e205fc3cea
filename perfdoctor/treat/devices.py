"""A device as it was given, checked against what this machine has."""

from __future__ import annotations

from typing import Any

import torch

from perfdoctor.errors import UsageError


def named_device(device: Any, who: str) -> torch.device:
    """What `device` names: "cuda", "cuda:1", 1, "cpu" or a torch.device; without an index where it gave none.

    Raises UsageError for what names none.
    """
    try:
        return torch.device("cuda", device) if type(device) is int else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{who}(device={device!r}): no device; expected 'cuda' or 'cuda:1'") from error


def numbered_device(named: torch.device, who: str) -> torch.device:
    """The CUDA device with its index, the current one where none was given. torch sees CUDA here.

    Raises UsageError for an index that this machine does not have.
    """
    index = torch.cuda.current_device() if named.index is None else named.index
    if not 0 <= index < torch.cuda.device_count():
        raise UsageError(
            f"{who}(device={str(named)!r}): this machine has {torch.cuda.device_count()} CUDA device(s), "
            "counted from cuda:0"
        )
    return torch.device("cuda", index)
