"""The Triton kernels behind `grad_norm`, `clip_grad_norm_` and `grad_stats`.

    l2 = sqrt(sum x^2)    abs_max = max |x|    sum = sum x    num_nonfinite = #{x : x is inf or NaN}

One launch reads every gradient once. The work list (see `work_list`) holds `num_chunks` items of one slot each (long
runs of words), then packs of eight slots (small tensors, ragged ends). A slot is two int64: the address, and
count | class << 32 | part << 40. Programs take items in a fixed stride, write one float64 partial each, and the last
one to finish adds them in a fixed order: the result is the same bit for bit in every run.
"""

# mypy: ignore-errors
# Triton reads these functions itself: its tensors have no types that mypy knows.

from __future__ import annotations

import triton
import triton.language as tl

from perfdoctor.kernels.triton_words import (
    BY_ELEMENT,
    L2,
    fold,
    fold_chunk,
    fold_slot,
    read_elements_below,
    read_slot,
    read_slot_below,
    read_words_below,
)


@triton.jit
def _read_parts(program_parts, num_programs, SPAN: tl.constexpr):
    """What all programs wrote. `.cg`: past an L1 that may be stale."""
    lanes = tl.arange(0, SPAN)
    return tl.load(program_parts + lanes, mask=lanes < num_programs, other=0.0, cache_modifier=".cg")


@triton.jit
def _store_stats(out, counts, column, num_columns, total, square, top, bad, num_elements):
    """One column of out float32 [4, num_columns] (sum, mean, L2, largest magnitude) and of counts int64."""
    tl.store(out + column, total.to(tl.float32))
    tl.store(out + num_columns + column, (total / num_elements.to(tl.float64)).to(tl.float32))
    tl.store(out + 2 * num_columns + column, tl.sqrt(square).to(tl.float32))
    tl.store(out + 3 * num_columns + column, top.to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(counts + column, bad.to(tl.int64))


@triton.jit
def _pack(square, total, top, bad, slots, first, DTYPE: tl.constexpr, WHAT: tl.constexpr, TILE: tl.constexpr):
    """Folds eight small slots. All descriptors come first, then all tiles: two memory latencies, not sixteen."""
    lanes = tl.arange(0, TILE)
    a0, n0, rest = read_slot(slots, first + 0)
    a1, n1, _ = read_slot(slots, first + 1)
    a2, n2, _ = read_slot(slots, first + 2)
    a3, n3, _ = read_slot(slots, first + 3)
    a4, n4, _ = read_slot(slots, first + 4)
    a5, n5, _ = read_slot(slots, first + 5)
    a6, n6, _ = read_slot(slots, first + 6)
    a7, n7, _ = read_slot(slots, first + 7)
    kind = ((rest >> 32) & 0xFF).to(tl.int32)
    if kind < BY_ELEMENT:
        w0 = read_words_below(a0, lanes, n0)
        w1 = read_words_below(a1, lanes, n1)
        w2 = read_words_below(a2, lanes, n2)
        w3 = read_words_below(a3, lanes, n3)
        w4 = read_words_below(a4, lanes, n4)
        w5 = read_words_below(a5, lanes, n5)
        w6 = read_words_below(a6, lanes, n6)
        w7 = read_words_below(a7, lanes, n7)
    else:
        w0 = read_elements_below(a0, lanes, n0, kind)
        w1 = read_elements_below(a1, lanes, n1, kind)
        w2 = read_elements_below(a2, lanes, n2, kind)
        w3 = read_elements_below(a3, lanes, n3, kind)
        w4 = read_elements_below(a4, lanes, n4, kind)
        w5 = read_elements_below(a5, lanes, n5, kind)
        w6 = read_elements_below(a6, lanes, n6, kind)
        w7 = read_elements_below(a7, lanes, n7, kind)
    return fold(square, total, top, bad, w0, w1, w2, w3, w4, w5, w6, w7, kind & 3, DTYPE, WHAT)


@triton.jit(do_not_specialize=["num_chunks", "num_items", "num_kept"])
def grad_norm_kernel(
    slots, program_parts, counter, out, coefficient, max_norm, num_chunks, num_items, num_kept,
    DTYPE: tl.constexpr, WHAT: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The total norm (WHAT = L2 or ABS_MAX) -> out [], and min(1, max_norm / (norm + 1e-6)) -> coefficient [].

    The first `num_kept` chunks may stay in the L2 cache for whoever reads the gradients next, from the front; the
    others leave it first, or they would push each other out before anyone comes back to them.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    all_square = tl.zeros((TILE,), tl.float64)
    total = tl.zeros((TILE,), tl.float32)
    top = tl.zeros((TILE,), tl.int32)
    bad = tl.zeros((TILE,), tl.int32)
    address, count, rest = read_slot_below(slots, program, num_chunks)
    for item in range(program, num_chunks, num_programs):
        # The next slot is on its way while this one's words are: else every chunk begins with a memory latency.
        next_address, next_count, next_rest = read_slot_below(slots, item + num_programs, num_chunks)
        square = tl.zeros((TILE,), tl.float32)
        kind = ((rest >> 32) & 0xFF).to(tl.int32)
        if item < num_kept:
            square, total, top, bad = fold_chunk(square, total, top, bad, address, count, kind, DTYPE, WHAT, TILE, "")
        else:
            square, total, top, bad = fold_chunk(
                square, total, top, bad, address, count, kind, DTYPE, WHAT, TILE, "evict_first"
            )
        if WHAT == L2:
            all_square += square.to(tl.float64)
        address, count, rest = next_address, next_count, next_rest
    behind = (num_chunks - program + num_programs - 1) // num_programs  # chunks that this program had
    for item in range(program + behind * num_programs, num_items, num_programs):
        square = tl.zeros((TILE,), tl.float32)
        first = num_chunks + (item - num_chunks) * 8
        square, total, top, bad = _pack(square, total, top, bad, slots, first, DTYPE, WHAT, TILE)
        if WHAT == L2:
            all_square += square.to(tl.float64)
    if WHAT == L2:
        tl.store(program_parts + program, tl.sum(all_square, 0))
    else:
        tl.store(program_parts + program, tl.max(top, 0).to(tl.float64))
    tl.debug_barrier()  # every thread's store is out before this program counts as done
    if tl.atomic_add(counter, 1, sem="acq_rel") == num_programs - 1:
        part = _read_parts(program_parts, num_programs, SPAN)
        if WHAT == L2:
            norm = tl.sqrt(tl.sum(part, 0)).to(tl.float32)
        else:
            norm = tl.max(part, 0).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(out, norm)
        ratio = tl.div_rn(max_norm, norm + 1e-6)  # rounded as torch and CUDA do: plain / is approximate
        tl.store(coefficient, tl.where(ratio > 1.0, 1.0, ratio))  # a NaN stays, as in torch
        tl.store(counter, 0)  # ready for the next launch on this stream


@triton.jit(do_not_specialize=["num_slots", "num_parts", "num_elements", "num_tensors"])
def grad_stats_kernel(
    slots,
    parts,
    program_parts,
    counter,
    out,
    counts,
    num_slots,
    num_parts,
    num_elements,
    num_tensors,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Sum, sum of squares, largest magnitude and number of non-finite values of every slot -> parts float64
    [4, num_parts]; of everything -> the last column of out float32 [4, num_tensors + 1] and of counts int64."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    all_square = 0.0
    all_total = 0.0
    all_top = 0.0
    all_bad = 0.0
    all_square = all_square.to(tl.float64)
    all_total = all_total.to(tl.float64)
    all_top = all_top.to(tl.float64)
    all_bad = all_bad.to(tl.float64)
    for item in range(program, num_slots, num_programs):
        address, count, rest = read_slot(slots, item)
        square, total, top, bad = fold_slot(address, count, ((rest >> 32) & 0xFF).to(tl.int32), DTYPE, TILE)
        slot_square = tl.sum(square.to(tl.float64), 0)
        slot_total = tl.sum(total.to(tl.float64), 0)
        slot_top = tl.max(top, 0).to(tl.float64)  # the bits of the largest magnitude, exact in float64
        slot_bad = tl.sum(bad, 0).to(tl.float64)
        here = parts + (rest >> 40)
        used = count > 0  # the slots that fill up a pack own no part
        tl.store(here, slot_total, mask=used)
        tl.store(here + num_parts, slot_square, mask=used)
        tl.store(here + 2 * num_parts, slot_top, mask=used)
        tl.store(here + 3 * num_parts, slot_bad, mask=used)
        all_total += slot_total
        all_square += slot_square
        all_top = tl.maximum(all_top, slot_top)
        all_bad += slot_bad
    tl.store(program_parts + program, all_total)
    tl.store(program_parts + num_programs + program, all_square)
    tl.store(program_parts + 2 * num_programs + program, all_top)
    tl.store(program_parts + 3 * num_programs + program, all_bad)
    tl.debug_barrier()  # every thread's store is out before this program counts as done
    if tl.atomic_add(counter, 1, sem="acq_rel") == num_programs - 1:
        total_ = tl.sum(_read_parts(program_parts, num_programs, SPAN), 0)
        square_ = tl.sum(_read_parts(program_parts + num_programs, num_programs, SPAN), 0)
        top_ = tl.max(_read_parts(program_parts + 2 * num_programs, num_programs, SPAN), 0)
        bad_ = tl.sum(_read_parts(program_parts + 3 * num_programs, num_programs, SPAN), 0)
        _store_stats(out, counts, num_tensors, num_tensors + 1, total_, square_, top_, bad_, num_elements)
        tl.store(counter, 0)


@triton.jit(do_not_specialize=["num_parts", "num_tensors"])
def per_tensor_kernel(parts, first_part, num_elements, out, counts, num_parts, num_tensors, SPAN: tl.constexpr):
    """One program a tensor: adds its parts [first_part[t], first_part[t + 1]) in order and writes column t."""
    tensor = tl.program_id(0)
    start = tl.load(first_part + tensor)
    end = tl.load(first_part + tensor + 1)
    lanes = tl.arange(0, SPAN)
    total = tl.zeros((SPAN,), tl.float64)
    square = tl.zeros((SPAN,), tl.float64)
    top = tl.zeros((SPAN,), tl.float64)
    bad = tl.zeros((SPAN,), tl.float64)
    for at in range(start, end, SPAN):
        here = at + lanes < end
        total += tl.load(parts + at + lanes, mask=here, other=0.0)
        square += tl.load(parts + num_parts + at + lanes, mask=here, other=0.0)
        top = tl.maximum(top, tl.load(parts + 2 * num_parts + at + lanes, mask=here, other=0.0))
        bad += tl.load(parts + 3 * num_parts + at + lanes, mask=here, other=0.0)
    _store_stats(
        out,
        counts,
        tensor,
        num_tensors + 1,
        tl.sum(total, 0),
        tl.sum(square, 0),
        tl.max(top, 0),
        tl.sum(bad, 0),
        tl.load(num_elements + tensor),
    )
