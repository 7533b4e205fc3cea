"""Treatments that a recording rules out: the loop has them already, or lacks what they change.

Names are those of perfdoctor's treatments. What a live session sees of the loop it notes as `has-<treatment>`; the rest
is in the names of the kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from perfdoctor.record.capture import Capture, WorkKind
from perfdoctor.record.kernel_names import KernelClass, kernel_class, without_tensor_cores
from perfdoctor.record.note_codes import HAS

_COMPILE = ("compile", "compile_reduce_overhead", "compile_max_autotune")
# inductor's kernels: triton_poi_fused_add_0, triton_red_fused_..., triton_per_..., triton_tem_fused_...
_COMPILED = re.compile(r"^triton_(poi|red|per|tem|for|mm)_")
_HALF = re.compile(r"bf16|fp16|f16|half|hmma|h?16816|h?884|h1688", re.IGNORECASE)
_DOUBLE = re.compile(r"dgemm|f64|double", re.IGNORECASE)
# Attention of cuDNN is a `flash_fprop` as well.
_CONVOLUTION = re.compile(r"^(?!.*(sdpa|flash|fmha)).*(conv(?!ert)|wgrad|dgrad|fprop|winograd|implicit)", re.IGNORECASE)
_CLIPPED = re.compile(r"LpNorm|NormTwoOps|NormOneOps|NormOps")
_OWN_NORM = re.compile(r"\bgrad_norm_kernel")
_FILLED = re.compile(r"FillFunctor")
# backward() and a few masks fill a tensor in any loop; zero_grad(set_to_none=False) fills one for each parameter.
_FEW_FILLS = 8


def ruled_out(capture: Capture) -> frozenset[str]:
    """Names of the treatments that this recording rules out."""
    noted = {note.code.removeprefix(HAS) for note in capture.notes if note.code.startswith(HAS)}
    return frozenset((*noted, *_by_kernels(capture)))


def has(capture: Capture, treatment: str) -> bool:
    """Whether a live session saw that the loop has this already."""
    return any(note.code == HAS + treatment for note in capture.notes)


def is_compiled(name: str) -> bool:
    """Whether torch.compile made this kernel."""
    return bool(_COMPILED.search(name))


def products(capture: Capture) -> tuple[list[str], list[str]]:
    """Names of the kernels of matrix products: without tensor cores, and in half precision."""
    matrix = [name for name in _kernels(capture) if kernel_class(name) == KernelClass.MATRIX]
    return [name for name in matrix if without_tensor_cores(name)], [name for name in matrix if _HALF.search(name)]


def is_double(name: str) -> bool:
    """Whether this kernel computes in float64."""
    return bool(_DOUBLE.search(name))


def _kernels(capture: Capture) -> list[str]:
    rows = np.unique(capture.work.name[capture.work.kind == WorkKind.KERNEL])
    return [capture.text(int(row)) for row in rows]


def _by_kernels(capture: Capture) -> Iterator[str]:
    names = _kernels(capture)
    if not names:
        return
    if any(map(is_compiled, names)):
        yield from _COMPILE
    plain, half = products(capture)
    if half:
        yield "bf16_autocast"
    if plain and all(map(is_double, plain)):  # neither turns float64 into anything else
        yield from ("bf16_autocast", "tf32")
    if not any(map(_CONVOLUTION.search, names)):
        yield "channels_last"
    if any(map(_OWN_NORM.search, names)) or not any(map(_CLIPPED.search, names)):
        yield "our_clip"
    if not any("ZeroFunctor" in name for name in names) and _fills_a_step(capture) < _FEW_FILLS:
        yield "set_to_none"


def _fills_a_step(capture: Capture) -> float:
    filled = capture.matching(_FILLED.search)
    return float(filled[capture.work.name].sum()) / max(len(capture.steps), 1)
