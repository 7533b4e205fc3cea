"""A model's dropout, and running without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def dropouts(model: torch.nn.Module | None) -> list[Any]:
    """The modules that drop something, with a probability above 0."""
    modules: list[Any] = [] if model is None else list(model.modules())
    return [each for each in modules if isinstance(each, torch.nn.modules.dropout._DropoutNd) and each.p > 0]


@contextmanager
def without_dropout(model: torch.nn.Module | None) -> Iterator[bool]:
    """No dropout: compiled kernels and other memory layouts draw other masks, which says nothing of their sums.

    Gives whether there was any.
    """
    found = [(module, module.p) for module in dropouts(model)]
    try:
        for module, _ in found:
            module.p = 0.0
        yield bool(found)
    finally:
        for module, share in found:
            module.p = share
