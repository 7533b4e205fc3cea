"""Treatments of the way batches come: DataLoader workers, pinned memory, workers that persist, prefetch."""

from __future__ import annotations

import functools
import multiprocessing.util
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from perfdoctor.treat.cures import CURES
from perfdoctor.treat.loader_layers import Layer, beneath, layer_names, layered, num_batches
from perfdoctor.treat.switches_precision import needs_cuda
from perfdoctor.treat.treatment import Loop, Numerics, Treatment
from perfdoctor.units import format_plural, format_share
from perfdoctor.watch.surroundings import usable_cpus

NO_LOADER = "the loop's loader is not known (no DataLoader was iterated; in Python: Loop(loader=...))"
_MOST_WORKERS = 8
_FEWEST_WAITING = 4
_WAITS = 0.5  # a fetch that computes for less of its time leaves its CPU to others
_SOCKET_NAME_BYTES = len("/pymp-12345678/listener-12345678")
_SOCKET_PATH_BYTES = 107  # sun_path of unix(7), less the closing zero
_ORDER = (
    "the sampler draws in the training process, so batches and their order stay; a dataset that draws random numbers "
    "itself draws others in a worker (kept by hand, workers that persist draw one seed less from torch's generator in "
    "each epoch after the first, which shifts shuffling and dropout)"
)
_OTHER_DRAWS = "a dataset that draws random numbers draws others in a worker"


def _refuse_loader(loop: Loop) -> str | None:
    if loop.loader is None:
        return NO_LOADER
    if not isinstance(loop.loader, DataLoader):
        return f"the loader is a {type(loop.loader).__name__}, no torch.utils.data.DataLoader"
    return None


def _refuse_workers(loop: Loop) -> str | None:
    refusal = _refuse_loader(loop)
    if refusal:
        return refusal
    loader: Any = loop.loader
    if isinstance(loader.dataset, IterableDataset):
        return "the dataset is an IterableDataset: each worker would give the whole stream unless it shards itself"
    if "dataloader_workers" in layer_names(loader) or 0 < fitting_workers(loop) <= loader.num_workers:
        return f"the loader has {format_plural(loader.num_workers, 'worker')} already, as many as fit{_why_no_more()}"
    if fitting_workers(loop) == 0:
        return "this process may use one CPU; a worker would only take turns with it"
    if _is_socket_path_too_long():
        return (
            f"the folder for temporary files, {tempfile.gettempdir()}, has too long a name: workers hand tensors over "
            "by sockets in it, and would stand still (set TMPDIR to a shorter one)"
        )
    on_device = [name for name, value in getattr(loader.dataset, "__dict__", {}).items() if _on_device(value)]
    if on_device:
        return f"the dataset's {on_device[0]} lies on the device, which a worker process cannot use"
    return None


def _is_socket_path_too_long() -> bool:
    """Whether a worker's socket, TMPDIR/pymp-xxxxxxxx/listener-xxxxxxxx, cannot be bound.

    The error comes in a thread of the worker, which prints it and loses the batch: the loop waits for ever.
    """
    sharing: Any = torch.multiprocessing
    if sharing.get_sharing_strategy() != "file_descriptor":
        return False
    if hasattr(multiprocessing.util, "_SUN_PATH_MAX"):  # a Python (3.14, late 3.13) that then takes another folder
        return False
    return len(os.fsencode(tempfile.gettempdir())) + _SOCKET_NAME_BYTES > _SOCKET_PATH_BYTES


def _on_device(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type != "cpu"
    return isinstance(value, tuple | list) and any(map(_on_device, value))


def _refuse_pinning(loop: Loop) -> str | None:
    refusal = needs_cuda(loop, "pinned memory") or _refuse_loader(loop)
    if refusal:
        return refusal
    return "the loader pins already" if loop.loader.pin_memory else None  # type: ignore[union-attr]


def _refuse_persistent(loop: Loop) -> str | None:
    refusal = _refuse_loader(loop)
    if refusal:
        return refusal
    loader: Any = loop.loader
    if loader.num_workers == 0:
        return "the loader has no workers; give it some first (dataloader_workers)"
    return "the workers persist already" if loader.persistent_workers else None


@contextmanager
def _loader_set(loop: Loop, name: str, settings: Callable[[Loop], dict[str, Any]]) -> Iterator[Loop]:
    """Settings of the loader itself; they hold from its next `iter()` on. Workers started here are ended here."""
    with layered(loop.loader, Layer(name=name, settings=settings(loop))):
        yield loop


def fitting_workers(loop: Loop) -> int:
    """How many workers to try in this loop, 0 where none would help.

    Where samples are computed, twice those that the loader has (8 at least), as far as the CPUs go beside the loop;
    where they wait, as many as keep these CPUs busy, 4 to 8.
    """
    beside = usable_cpus() - 1
    computing = max(min(max(_MOST_WORKERS, 2 * _workers_now(loop)), int(beside)), 0)
    share = loop.fetch_cpu_share or 0.0
    if not _waits(loop):
        return computing
    waiting = _MOST_WORKERS if share <= 0 else min(max(int(beside / share), _FEWEST_WAITING), _MOST_WORKERS)
    return max(computing, waiting)


def _waits(loop: Loop) -> bool:
    return loop.fetch_cpu_share is not None and loop.fetch_cpu_share < _WAITS


def _workers_now(loop: Loop) -> int:
    return int(getattr(loop.loader, "num_workers", 0))


def _why_no_more() -> str:
    return f" beside the loop on {format_plural(usable_cpus(), 'CPU')}"


def _worker_lines(loop: Loop) -> tuple[str, ...]:
    """The loader with as many workers as are tried in this loop."""
    remarks = [f"{_workers_now(loop)} now"] if _workers_now(loop) else []
    remarks.append(f"{format_plural(usable_cpus(), 'CPU')} here")
    if _waits(loop):
        remarks.append(f"a fetch waits for {format_share(1 - (loop.fetch_cpu_share or 0.0))} of its time")
    remark = ", ".join(remarks)
    return (f"loader = DataLoader(..., num_workers={_tried_workers(loop)}, persistent_workers=True)   # {remark}",)


def _tried_workers(loop: Loop) -> int:
    return max(fitting_workers(loop), 1)


def _worker_setting(loop: Loop) -> str:
    return f"num_workers={_tried_workers(loop)} ({_workers_now(loop)} now)"


def _worker_settings(loop: Loop) -> dict[str, Any]:
    loader: Any = loop.loader
    return {
        "num_workers": _tried_workers(loop),
        "prefetch_factor": loader.prefetch_factor or 2,
        "persistent_workers": True,
        "check_worker_number_rationality": _keep_silent,  # torch's warning of more workers than CPUs is for the user's
    }


def _keep_silent() -> None:
    pass


def _refuse_prefetch(loop: Loop) -> str | None:
    refusal = needs_cuda(loop, "prefetching to the device")
    if refusal:
        return refusal
    if loop.loader is None:
        return NO_LOADER
    if type(loop.loader).__name__ == "DevicePrefetcher" or "prefetch" in layer_names(loop.loader):
        return "the loader prefetches to the device already"
    return None


@contextmanager
def _prefetch(loop: Loop) -> Iterator[Loop]:
    """Batches arrive on the device. A DataLoader is changed in place, so that a script's own name for it gives them;
    anything else is replaced in the loop that is handed out."""
    from perfdoctor.treat.prefetch import DevicePrefetcher

    loader: Any = loop.loader
    if not isinstance(loader, DataLoader):
        prefetcher = DevicePrefetcher(loader, loop.device)
        try:
            yield replace(loop, loader=prefetcher)
        finally:
            prefetcher.close()
        return
    layer = Layer(name="prefetch")
    prefetcher = DevicePrefetcher(_AsItWas(loader, layer), loop.device)
    layer.iterate = functools.partial(iter, prefetcher)
    try:
        with layered(loader, layer):
            yield loop
    finally:
        prefetcher.close()


class _AsItWas:
    """A DataLoader's own batches, while the loader itself gives others."""

    def __init__(self, loader: Any, layer: Layer) -> None:
        self._loader = loader
        self._layer = layer

    def __iter__(self) -> Iterator[Any]:
        return beneath(self._loader, self._layer)

    def __len__(self) -> int:
        return num_batches(self._loader)


def _setting(name: str, settings: Callable[[Loop], dict[str, Any]]) -> Any:
    return functools.partial(_loader_set, name=name, settings=settings)


LOADER = (
    Treatment(
        name="dataloader_workers",
        cures=CURES["dataloader_workers"],
        numerics=Numerics(why=_ORDER, other_draws=_OTHER_DRAWS),
        refuses=_refuse_workers,
        applied=_setting("dataloader_workers", _worker_settings),
        lines=_worker_lines(Loop(device=torch.device("cpu"))),
        lines_of=_worker_lines,
        setting_of=_worker_setting,
    ),
    Treatment(
        name="pin_memory",
        cures=CURES["pin_memory"],
        numerics=Numerics(why="the same bytes, copied from pinned memory"),
        refuses=_refuse_pinning,
        applied=_setting("pin_memory", lambda _: {"pin_memory": True}),
        lines=("loader = DataLoader(..., pin_memory=True)", "x = x.to(device, non_blocking=True)"),
    ),
    Treatment(
        name="persistent_workers",
        cures=CURES["persistent_workers"],
        numerics=Numerics(why=_ORDER),
        refuses=_refuse_persistent,
        applied=_setting("persistent_workers", lambda _: {"persistent_workers": True}),
        lines=("loader = DataLoader(..., persistent_workers=True)",),
    ),
    Treatment(
        name="prefetch",
        cures=CURES["prefetch"],
        numerics=Numerics(why="the same bytes, copied earlier"),
        refuses=_refuse_prefetch,
        applied=_prefetch,
        lines=("for batch in perfdoctor.DevicePrefetcher(loader, device):",),
    ),
)
