"""The Triton kernel behind `NonFiniteWatch`: gradients and loss checked, and the result noted, in one launch.

It reads the gradients as `grad_stats_triton` does, by the same slots. Where all values are finite nobody writes but the
last program, which looks at the loss; a program that meets others adds them to their gradient's count.
"""

# mypy: ignore-errors
# Triton reads these functions itself: its tensors have no types that mypy knows.

from __future__ import annotations

import triton
import triton.language as tl

from perfdoctor.kernels.metrics_triton import note
from perfdoctor.kernels.triton_words import fold_slot, read_slot


@triton.jit
def _gradient_of(first_part, num_tensors, part, TILE: tl.constexpr):
    """The gradient that owns this part: as many end at or before it as come before it."""
    lanes = tl.arange(0, TILE)
    before = tl.zeros((TILE,), tl.int32)
    for at in range(0, num_tensors, TILE):
        here = at + lanes < num_tensors
        end = tl.load(first_part + 1 + at + lanes, mask=here, other=0)
        before += (here & (end <= part)).to(tl.int32)
    return tl.sum(before, 0)


@triton.jit(do_not_specialize=["loss", "excuse", "check", "num_slots", "num_tensors"])
def finite_kernel(
    slots,
    first_part,
    counts,
    counter,
    record,
    found,
    loss,
    excuse,
    check,
    num_slots,
    num_tensors,
    DTYPE: tl.constexpr,
    HAS_LOSS: tl.constexpr,
    EXCUSE: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Counts the non-finite values of every gradient, then does what `metrics_triton.nonfinite_kernel` does.

    counts int64 [num_tensors] and counter int32 [1] are zero before and after.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    for item in range(program, num_slots, num_programs):
        address, count, rest = read_slot(slots, item)
        kind = ((rest >> 32) & 0xFF).to(tl.int32)
        _square, _total, _top, bad = fold_slot(address, count, kind, DTYPE, TILE)
        num_bad = tl.sum(bad, 0)
        if num_bad > 0:
            gradient = _gradient_of(first_part, num_tensors, rest >> 40, TILE)
            tl.atomic_add(counts + gradient, num_bad.to(tl.int64))
    tl.debug_barrier()  # every thread's counts are out before this program counts as done
    if tl.atomic_add(counter, 1, sem="acq_rel") == num_programs - 1:
        num_bad = note(record, found, loss, excuse, counts, num_tensors, check, HAS_LOSS, EXCUSE, SPAN)
        if num_bad > 0:
            tl.debug_barrier()  # every thread has read the counts
            lanes = tl.arange(0, SPAN)
            for at in range(0, num_tensors, SPAN):
                tl.store(counts + at + lanes, tl.zeros((SPAN,), tl.int64), mask=at + lanes < num_tensors)
        tl.store(counter, 0)
