"""Recompilations that a DataLoader's ragged last batch causes: the line that built the loader."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from perfdoctor.treat.graph_sources import NameSpace, construction, instances
from perfdoctor.treat.recompilations import Recompilation

_SIZES = re.compile(r"size mismatch at index \d+\. expected (\d+), actual (\d+)")


def with_loaders(found: Iterable[Recompilation], spaces: list[NameSpace]) -> tuple[Recompilation, ...]:
    """The same, with `cause` where a loader in `spaces` gives batches of the two sizes that the guard names."""
    from torch.utils.data import DataLoader

    loaders = instances(spaces, DataLoader)
    return tuple(_caused(each, loaders, spaces) for each in found)


def _caused(again: Recompilation, loaders: list[Any], spaces: list[NameSpace]) -> Recompilation:
    sizes = _SIZES.search(again.guard)
    for loader in loaders if sizes is not None else ():
        if _sizes(loader) == {int(size) for size in sizes.groups()}:  # type: ignore[union-attr]
            site = construction(loader, spaces)
            if site is not None:
                return replace(again, cause=site.frame)
    return again


def _sizes(loader: Any) -> set[int]:
    """The sizes of a loader's batches where it gives two."""
    try:
        samples, size = len(loader.dataset), loader.batch_size
    except TypeError:  # a stream has no length
        return set()
    if not size or loader.drop_last or samples < size or samples % size == 0:
        return set()
    return {size, samples % size}
