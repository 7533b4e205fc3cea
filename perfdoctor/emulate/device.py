"""`emulate_cuda()`: a CUDA device in name only, for a block of code."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from perfdoctor.emulate import (
    amp,
    arrivals,
    comm,
    compiled,
    cuda_api,
    device_names,
    distributed,
    factories,
    lazy,
    logged_metrics,
    serialization,
    triton_kernels,
)
from perfdoctor.emulate.patches import Patches
from perfdoctor.emulate.transfers import METHODS
from perfdoctor.record import crossings
from perfdoctor.record.call_site import HitLog
from perfdoctor.record.capture import Note

_PARTS = (
    cuda_api, device_names, factories, amp, serialization, compiled, distributed, comm, triton_kernels, lazy,
    logged_metrics,
)  # fmt: skip
_lock = threading.RLock()
_open = 0
_patches = Patches()


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """What `emulate_cuda()` yields: the log of crossings, and notes on what ran otherwise than on a GPU."""

    log: HitLog
    notes: list[Note] = field(default_factory=list)


@contextmanager
def emulate_cuda(log: HitLog | None = None) -> Iterator[EmulatedDevice]:
    """Let code that says "cuda" run on the CPU, and log every crossing between host and device and every host wait.

    Inside, `torch.cuda.is_available()` is True and tensors report `cuda:0`. Results equal a plain CPU run bit for bit;
    under `autocast("cuda")` CUDA's own cast list applies. Blocks nest: inner and outer logs both get the crossings.
    Tensors made inside stay usable afterwards but report nothing.
    A real device of the machine is hidden while the block runs.
    """
    device = EmulatedDevice(log if log is not None else HitLog())
    _enter(device)
    try:
        yield device
    finally:
        _leave(device)


def _enter(device: EmulatedDevice) -> None:
    global _open
    with _lock:
        if _open == 0:
            try:
                _install()
            except BaseException:
                _patches.undo()
                raise
        _open += 1
        crossings.open_device()
        crossings.join(device.log)
        compiled.open_notes(device.notes)


def _leave(device: EmulatedDevice) -> None:
    global _open
    with _lock:
        crossings.leave(device.log)
        crossings.close_device()
        compiled.close_notes(device.notes)
        _open -= 1
        if _open == 0:
            arrivals.arrive()
            _patches.undo()


def _install() -> None:
    # Every optimizer imports it, and it files torch's functions by identity: let it see the real ones.
    importlib.import_module("torch._dynamo")
    for name, value in METHODS.items():
        _patches.set(torch.Tensor, name, value)
    for part in _PARTS:
        part.install(_patches)
