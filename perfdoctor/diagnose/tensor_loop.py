"""Python loops over many tensors, seen in what they launch: the same few small kernels, again and again.

A single-tensor optimizer, a norm of every gradient, an EMA by hand: for each tensor the same short motif of pointwise
and reduction kernels (and perhaps a read), with no matrix kernel between. Layers of a model repeat too, but with matrix
kernels in the motif. The multi-tensor form launches the motif once for all tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfdoctor.diagnose.runs import runs_of
from perfdoctor.record.capture import CopyKind, Ints, WorkKind
from perfdoctor.record.kernel_names import KernelClass, kernel_class, kernel_family
from perfdoctor.record.timeline import Timeline, step_index

MIN_REPEATS = 16
MAX_MOTIF = 24
_MATRIX, _OTHER, _READ, _SKIPPED = -1, -2, -3, -4
_LOOPED = (KernelClass.POINTWISE, KernelClass.REDUCTION, KernelClass.MULTI_TENSOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLoop:
    """One loop in one round of the steps.

    `works`: indices into `Timeline.work`, in the order of launch; `motif` their families in one turn;
    `first_call`, `last_call`: the launching calls between which it ran; `reads`: whether a turn reads a value back.
    """

    works: Ints
    motif: tuple[str, ...]
    repeats: int
    first_call: int
    last_call: int
    reads: bool


def find_tensor_loops(timeline: Timeline) -> tuple[TensorLoop, ...]:
    """All loops over tensors in the recording, in the order of launch."""
    order = timeline.launch_order
    symbols, families = _symbols(timeline, order)
    kept = symbols != _SKIPPED
    order, symbols = order[kept], symbols[kept]
    allowed = (symbols >= 0) | (symbols == _READ)
    loops = []
    for start, stop, motif in _periodic_runs(symbols, allowed, _steps_of(timeline, order)):
        works = order[start:stop]
        calls = timeline.call_of_work[works]
        names = tuple("read" if s == _READ else families[s] for s in symbols[start : start + motif].tolist())
        if motif == 1 and names[0].startswith("foreach"):
            continue  # one multi-tensor call over much memory: its chunks, launched from C++
        loops.append(
            TensorLoop(
                works=works,
                motif=names,
                repeats=(stop - start) // motif,
                first_call=int(calls.min()),
                last_call=int(calls.max()),
                reads="read" in names,
            )
        )
    return tuple(loops)


def _symbols(timeline: Timeline, order: Ints) -> tuple[Ints, list[str]]:
    """One number for each launched work: its family where a loop may hold it, else a negative marker.

    Memsets are skipped: a reduction that needs a second pass clears a counter first, a small one does not.
    """
    work, text = timeline.work, timeline.capture.text
    families: dict[str, int] = {}
    by_name: dict[int, int] = {}
    for name in np.unique(work.name[order]).tolist():
        family, kind = kernel_family(text(name)), kernel_class(text(name))
        by_name[name] = families.setdefault(family, len(families)) if kind in _LOOPED else _MATRIX
    symbols = np.array([by_name[n] for n in work.name[order].tolist()], np.int64)
    kinds, copies = work.kind[order], work.copy[order]
    symbols[kinds == WorkKind.GRAPH] = _OTHER
    symbols[kinds == WorkKind.MEMSET] = _SKIPPED
    symbols[kinds == WorkKind.MEMCPY] = _OTHER
    symbols[(kinds == WorkKind.MEMCPY) & (copies == CopyKind.D2H)] = _READ
    return symbols, list(families)


def _steps_of(timeline: Timeline, order: Ints) -> Ints:
    """The step in which each work was launched: a loop ends with its step, even if the next step begins with it."""
    steps = timeline.steps
    if steps is None:
        return np.zeros(len(order), np.int64)
    return step_index(steps.host_start_ns, timeline.launch_ns[order])


def _periodic_runs(symbols: Ints, allowed: NDArray[np.bool_], steps: Ints) -> list[tuple[int, int, int]]:
    """`(start, stop, motif length)` of maximal runs in a step that repeat a motif at least MIN_REPEATS times."""
    taken = ~allowed
    runs = []
    for motif in range(1, MAX_MOTIF + 1):
        same = np.zeros(len(symbols), bool)
        if len(symbols) <= motif:
            break
        same[:-motif] = (symbols[:-motif] == symbols[motif:]) & (steps[:-motif] == steps[motif:])
        same[:-motif] &= ~taken[:-motif] & ~taken[motif:]
        for start, stop in runs_of(same, shortest=(MIN_REPEATS - 1) * motif):
            repeats = (stop - start) // motif + 1
            if taken[start : stop + motif].any():
                continue
            runs.append((start, start + repeats * motif, motif))
            taken[start : start + repeats * motif] = True
    return sorted(runs)
