"""The border between host and emulated device: who crosses it, and what kind of crossing it is.

Every crossing ends in `cross(kind)`, which writes to the logs of the emulated devices that are open. A library on the
stack that implies a better name for the crossing (GradScaler, torch.distributions, a logger) wins over the raw kind.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from perfdoctor.emulate.logged_metrics import logged_site
from perfdoctor.record.call_site import library_kind
from perfdoctor.record.crossings import LOGS
from perfdoctor.record.sync_kinds import HOST_SYNC, KINDS


class _Thread(threading.local):
    quiet: int = 0
    hint: str | None = None


_thread = _Thread()
on_wait: list[Callable[[], None]] = []  # called at each crossing that waits for the stream
# What these are their caller knows, whatever library is on the stack.
_OWN_NAMES = ("cuda_synchronize", "barrier", "sync_dist")
# These wait for nothing, or for what their own code knows better.
_NO_WAIT = ("d2h_race", "h2d_pageable", "cuda_synchronize")
sync_debug_mode = 0  # what the user's torch.cuda.set_sync_debug_mode asked for


def cross(kind: str, frame: FrameType | None = None) -> None:
    """Record one crossing at the line that is running now.

    Raises:
        Exception: whatever a listener of the log raises (a sync budget that is used up).
    """
    if _thread.quiet or not LOGS:
        return
    here = frame if frame is not None else sys._getframe(1)
    if kind not in _NO_WAIT:
        for arrive in on_wait:
            arrive()
    kind = _refined(kind, here)
    now = time.time_ns()
    for log in tuple(LOGS):
        site = logged_site(here, log) if kind == "logging" else None
        log.add_at(kind, log.sites.at(here) if site is None else site, now, time.time_ns())
    if sync_debug_mode:
        _obey_sync_debug_mode(kind)


def _refined(kind: str, frame: FrameType) -> str:
    if KINDS[kind].code != HOST_SYNC or kind in _OWN_NAMES:
        return kind
    if torch.is_anomaly_enabled() and in_backward(frame):
        return "anomaly_check"
    implied = library_kind(frame)
    # An optimizer that reads (LBFGS) reads what its user could read: the site names the optimizer's line already.
    return kind if implied in (None, "optimizer_internal") else implied


def in_backward(frame: FrameType | None) -> bool:
    """Whether the autograd engine itself runs the op, with no Python function of a backward in between."""
    # The engine runs on the caller's thread here: its Python entry is the innermost frame outside perfdoctor.
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("perfdoctor."):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.autograd.graph"


def _obey_sync_debug_mode(kind: str) -> None:
    import warnings

    # torch's mode does not see these (measured on an H200).
    if kind in (*_OWN_NAMES, "empty_cache", "d2h_race"):
        return
    if sync_debug_mode == 2:
        raise RuntimeError("called a synchronizing CUDA operation")
    warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=3)


def named(default: str) -> str:
    """The kind that `hint` gave to a read, or `default`."""
    return _thread.hint or default


def hint(kind: str | None) -> str | None:
    """Name the reads that follow on this thread (`int(x)` and `if x` run the same op); returns the name before."""
    before = _thread.hint
    _thread.hint = kind
    return before


@contextmanager
def quiet() -> Iterator[None]:
    """Record nothing inside: the CPU kernel reads values there that the CUDA kernel leaves on the device."""
    _thread.quiet += 1
    try:
        yield
    finally:
        _thread.quiet -= 1
