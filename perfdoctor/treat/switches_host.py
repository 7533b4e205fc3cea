"""Treatments of what the host does beside launching: garbage collection held off, values read every N steps."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from perfdoctor.record.call_site import own_frame
from perfdoctor.record.owners import PYTHON, TORCH, file_owner
from perfdoctor.treat.cures import CURES
from perfdoctor.treat.switches_precision import needs_cuda
from perfdoctor.treat.treatment import Loop, Numerics, Treatment
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.tensor_method import TensorMethod

LOG_EVERY = 10
# They act on what they read (GradScaler on an overflow, an optimizer on its step count).
_ACTING = (TORCH, PYTHON)
_num_applied = 0
_READS = ("item", "tolist", "__float__", "__int__")


def _refuse_gc(_: Loop) -> str | None:
    return None if gc.isenabled() else "Python's garbage collector is off already"


@contextmanager
def _gc_frozen(loop: Loop) -> Iterator[Loop]:
    """Collected once, then off: what is alive now is frozen unless the script froze objects of its own."""
    gc.collect()
    ours = gc.get_freeze_count() == 0
    try:
        gc.disable()
        if ours:
            gc.freeze()
        yield loop
    finally:
        if ours:
            gc.unfreeze()
        gc.enable()


def _refuse_log_every(loop: Loop) -> str | None:
    refusal = needs_cuda(loop, "a read that waits")
    if refusal:
        return refusal
    return f"only every {LOG_EVERY}th read waits already" if _num_applied else None


@contextmanager
def _log_every(loop: Loop) -> Iterator[Loop]:
    """One-element device tensors that a line reads: really on every tenth pass, else the line gets its last value."""
    global _num_applied
    patches = Patches()
    last: dict[tuple[Any, int, int], tuple[int, Any]] = {}
    _num_applied += 1
    try:
        for name in _READS:
            method = getattr(torch.Tensor, name)
            patches.replace(torch.Tensor, name, TensorMethod(method, _reader(loop.device.type, last)))
        yield loop
    finally:
        _num_applied -= 1
        patches.undo()


def _reader(device: str, last: dict[tuple[Any, int, int], tuple[int, Any]]) -> Callable[..., Any]:
    def read(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or tensor.device.type != device or tensor.numel() != 1:
            return original(tensor, *args, **kwargs)
        frame = own_frame(sys._getframe(2))  # over TensorMethod's own and any hook of a session
        if file_owner(frame.f_code.co_filename) in _ACTING:
            return original(tensor, *args, **kwargs)
        place = (frame.f_code, frame.f_lasti, tensor.dim())
        passes, value = last.get(place, (0, None))
        if passes % LOG_EVERY == 0:
            value = original(tensor, *args, **kwargs)
        last[place] = (passes + 1, value)
        return value

    return read


HOST = (
    Treatment(
        name="gc_frozen",
        cures=CURES["gc_frozen"],
        numerics=Numerics(why="only when dead cycles of objects are found changes; their memory is held longer"),
        refuses=_refuse_gc,
        applied=_gc_frozen,
        lines=("gc.collect(); gc.freeze(); gc.disable()", "if step % 1000 == 0: gc.collect()"),
    ),
    Treatment(
        name="log_every_n",
        cures=CURES["log_every_n"],
        numerics=Numerics(
            why=f"the model's numbers stay where values are only logged; logged ones are up to {LOG_EVERY - 1} "
            "steps old. A loop that branches on what it reads branches on old values",
        ),
        refuses=_refuse_log_every,
        applied=_log_every,
        lines=(f"if step % {LOG_EVERY} == 0:", "    print(loss.item())"),
    ),
)
