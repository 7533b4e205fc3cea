"""Treatments of what the host does beside launching: garbage collection held off, values read every N steps."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from perfdoctor.record.call_site import own_frame
from perfdoctor.record.owners import PYTHON, TORCH, file_owner
from perfdoctor.treat.cures import CURES
from perfdoctor.treat.switches_precision import needs_cuda
from perfdoctor.treat.treatment import Loop, Numerics, Treatment
from perfdoctor.watch.garbage import froze_objects
from perfdoctor.watch.patches import Patches
from perfdoctor.watch.tensor_method import TensorMethod

LOG_EVERY = 10
_MOST_READS = 1000  # of one line in one step; those after are read each time, and nothing is kept of them
# They act on what they read (GradScaler on an overflow, an optimizer on its step count).
_ACTING = (TORCH, PYTHON)
_num_applied = 0
_READS = ("item", "tolist", "__float__", "__int__")


def _refuse_gc(_: Loop) -> str | None:
    return None if gc.isenabled() else "Python's garbage collector is off already"


@contextmanager
def _gc_frozen(loop: Loop) -> Iterator[Loop]:
    """Collected once, then off: what is alive now is frozen unless the script froze objects of its own."""
    if not gc.isenabled():
        yield loop
        return
    gc.collect()
    ours = not froze_objects()
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


class _Reads:
    """Tells the reads of a line apart: a line that is passed several times a step reads several values.

    Where no update was seen (no optimizer, or one inside a CUDA graph) each pass of a line counts as a step.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._step = 0
        self._passes: dict[Hashable, int] = {}
        self._last: dict[Hashable, tuple[int, Any]] = {}  # when it was really read, and what came
        self._has_steps = False
        self._hook: Any = None
        if optimizers:
            with suppress(AttributeError):  # one that only stands for another has no hooks
                self._hook = optimizers[0].register_step_post_hook(self._end_step)

    def remove(self) -> None:
        """Take the hook back."""
        if self._hook is not None:
            self._hook.remove()

    def value(self, line: Hashable, read: Callable[[], Any]) -> Any:
        """The value of this read: really read where the last one of its kind is `LOG_EVERY` steps old."""
        passes = self._passes.get(line, 0)
        self._passes[line] = passes + 1
        # The first update is still to come, or it lies in a graph: more passes than these are steps.
        by_step = self._has_steps or (self._hook is not None and passes < LOG_EVERY)
        if by_step and passes >= _MOST_READS:
            return read()
        kind, now = ((line, passes), self._step) if by_step else (line, passes)
        found = self._last.get(kind)
        if found is None or now - found[0] >= LOG_EVERY:
            found = self._last[kind] = now, read()
        return found[1]

    def _end_step(self, *_: Any) -> None:
        self._has_steps = True
        self._step += 1
        self._passes.clear()


@contextmanager
def _log_every(loop: Loop) -> Iterator[Loop]:
    """One-element device tensors that a line reads: really in every tenth step, else the line gets its last value."""
    global _num_applied
    if _num_applied:
        yield loop
        return
    patches, reads = Patches(), _Reads(loop.optimizers)
    _num_applied += 1
    try:
        for name in _READS:
            method = getattr(torch.Tensor, name)
            patches.replace(torch.Tensor, name, TensorMethod(method, _reader(loop.device.type, reads)))
        yield loop
    finally:
        _num_applied -= 1
        patches.undo()
        reads.remove()


def _reader(device: str, reads: _Reads) -> Callable[..., Any]:
    def read(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or tensor.device.type != device or tensor.numel() != 1:
            return original(tensor, *args, **kwargs)
        frame = own_frame(sys._getframe(2))  # over TensorMethod's own and any hook of a session
        if file_owner(frame.f_code.co_filename) in _ACTING:
            return original(tensor, *args, **kwargs)
        line = (frame.f_code, frame.f_lasti, tensor.dim())
        return reads.value(line, lambda: original(tensor, *args, **kwargs))

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
