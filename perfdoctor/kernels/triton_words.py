"""Gradients as 4-byte words, in Triton: reading them, and what a program adds up of them.

A gradient is read as words whatever its type, 16 bytes a thread and load, eight loads in flight before the first is
used: a two-byte type then has as many bytes in flight as float32 has. What is added up are four things: the sum of
squares, the sum, the largest magnitude (as float32 bits, see `magnitude`) and the number of non-finite values.
"""

# mypy: ignore-errors
# Triton reads these functions itself: its tensors have no types that mypy knows.

from __future__ import annotations

import triton
import triton.language as tl

L2: tl.constexpr = tl.constexpr(0)
ABS_MAX: tl.constexpr = tl.constexpr(1)
ALL: tl.constexpr = tl.constexpr(2)
# Slot classes. Below 4: 16-byte aligned words; from 4 on: element by element, any alignment.
FLOAT32: tl.constexpr = tl.constexpr(0)
FLOAT16: tl.constexpr = tl.constexpr(1)
BFLOAT16: tl.constexpr = tl.constexpr(2)
MIXED: tl.constexpr = tl.constexpr(3)  # as a kernel's DTYPE: the slot's class says which
BY_ELEMENT: tl.constexpr = tl.constexpr(4)


@triton.jit
def low_value(word, DTYPE: tl.constexpr):
    """The word's first element as float32."""
    if DTYPE == FLOAT32:
        return word.to(tl.float32, bitcast=True)
    elif DTYPE == BFLOAT16:
        return (word << 16).to(tl.float32, bitcast=True)
    else:
        return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_value(word, DTYPE: tl.constexpr):
    """The word's second element as float32 (two-byte types)."""
    if DTYPE == BFLOAT16:
        return (word & -65536).to(tl.float32, bitcast=True)
    else:
        return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def square_of(word, DTYPE: tl.constexpr):
    low = low_value(word, DTYPE)
    if DTYPE == FLOAT32:
        return low * low
    else:
        high = high_value(word, DTYPE)
        return low * low + high * high


@triton.jit
def sum_of(word, DTYPE: tl.constexpr):
    if DTYPE == FLOAT32:
        return low_value(word, DTYPE)
    else:
        return low_value(word, DTYPE) + high_value(word, DTYPE)


@triton.jit
def magnitude_of(word, DTYPE: tl.constexpr):
    """Largest |x| of the word as float32 bits: ordered like the values, with inf below every NaN, so NaN survives."""
    low = low_value(word, DTYPE).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if DTYPE == FLOAT32:
        return low
    else:
        return tl.maximum(low, high_value(word, DTYPE).to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def nonfinite_in(word, DTYPE: tl.constexpr):
    low = (low_value(word, DTYPE).to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000
    if DTYPE == FLOAT32:
        return low.to(tl.int32)
    else:
        high = (high_value(word, DTYPE).to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000
        return low.to(tl.int32) + high.to(tl.int32)


@triton.jit
def fold_one(square, total, top, bad, w, DTYPE: tl.constexpr, WHAT: tl.constexpr):
    if WHAT != ABS_MAX:
        square += square_of(w, DTYPE)
    if WHAT == ALL:
        total += sum_of(w, DTYPE)
        bad += nonfinite_in(w, DTYPE)
    if WHAT != L2:
        top = tl.maximum(top, magnitude_of(w, DTYPE))
    return square, total, top, bad


@triton.jit
def fold_eight(square, total, top, bad, w0, w1, w2, w3, w4, w5, w6, w7, DTYPE: tl.constexpr, WHAT: tl.constexpr):
    """Adds eight tiles as a tree: chains of float32 additions stay short, whatever the size of the gradient."""
    if WHAT != ABS_MAX:
        square += ((square_of(w0, DTYPE) + square_of(w1, DTYPE)) + (square_of(w2, DTYPE) + square_of(w3, DTYPE))) + (
            (square_of(w4, DTYPE) + square_of(w5, DTYPE)) + (square_of(w6, DTYPE) + square_of(w7, DTYPE))
        )
    if WHAT == ALL:
        total += ((sum_of(w0, DTYPE) + sum_of(w1, DTYPE)) + (sum_of(w2, DTYPE) + sum_of(w3, DTYPE))) + (
            (sum_of(w4, DTYPE) + sum_of(w5, DTYPE)) + (sum_of(w6, DTYPE) + sum_of(w7, DTYPE))
        )
        bad += (nonfinite_in(w0, DTYPE) + nonfinite_in(w1, DTYPE)) + (nonfinite_in(w2, DTYPE) + nonfinite_in(w3, DTYPE))
        bad += (nonfinite_in(w4, DTYPE) + nonfinite_in(w5, DTYPE)) + (nonfinite_in(w6, DTYPE) + nonfinite_in(w7, DTYPE))
    if WHAT != L2:
        low = tl.maximum(magnitude_of(w0, DTYPE), magnitude_of(w1, DTYPE))
        low = tl.maximum(low, tl.maximum(magnitude_of(w2, DTYPE), magnitude_of(w3, DTYPE)))
        high = tl.maximum(magnitude_of(w4, DTYPE), magnitude_of(w5, DTYPE))
        high = tl.maximum(high, tl.maximum(magnitude_of(w6, DTYPE), magnitude_of(w7, DTYPE)))
        top = tl.maximum(top, tl.maximum(low, high))
    return square, total, top, bad


@triton.jit
def fold(square, total, top, bad, w0, w1, w2, w3, w4, w5, w6, w7, kind, DTYPE: tl.constexpr, WHAT: tl.constexpr):
    """`fold_eight` for the type that the kernel was made for, or for the one that `kind` names."""
    if DTYPE != MIXED:
        square, total, top, bad = fold_eight(square, total, top, bad, w0, w1, w2, w3, w4, w5, w6, w7, DTYPE, WHAT)
    else:
        if kind == FLOAT32:
            square, total, top, bad = fold_eight(square, total, top, bad, w0, w1, w2, w3, w4, w5, w6, w7, FLOAT32, WHAT)
        elif kind == FLOAT16:
            square, total, top, bad = fold_eight(square, total, top, bad, w0, w1, w2, w3, w4, w5, w6, w7, FLOAT16, WHAT)
        else:
            square, total, top, bad = fold_eight(
                square, total, top, bad, w0, w1, w2, w3, w4, w5, w6, w7, BFLOAT16, WHAT
            )
    return square, total, top, bad


@triton.jit
def read_words(address, offsets, POLICY: tl.constexpr):
    """A full tile of words from a 16-byte aligned address. POLICY: what the caches keep of it ("" or "evict_first")."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    return tl.load(pointer + offsets, eviction_policy=POLICY)


@triton.jit
def read_words_below(address, offsets, count):
    """A tile of words from a 16-byte aligned address; `count` is a multiple of 4; zeros behind it."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    # Compared in groups of four words: only so does the compiler see that a 16-byte load is masked as a whole.
    return tl.load(pointer + offsets, mask=offsets // 4 < count // 4, other=0)


@triton.jit
def read_elements_below(address, offsets, count, kind):
    """Elements at any alignment, one a word (a two-byte element's other half is zero)."""
    if kind == BY_ELEMENT:
        words = tl.load(address.to(tl.pointer_type(tl.int32)) + offsets, mask=offsets < count, other=0)
    else:
        halves = tl.load(address.to(tl.pointer_type(tl.int16)) + offsets, mask=offsets < count, other=0)
        words = halves.to(tl.int32) & 0xFFFF
    return words


@triton.jit
def read_slot(slots, index):
    """Address, count and the whole second half of a slot."""
    address = tl.load(slots + 2 * index)
    rest = tl.load(slots + 2 * index + 1)
    return address, (rest & 0x7FFFFFFF).to(tl.int32), rest


@triton.jit
def read_slot_below(slots, index, num_slots):
    """`read_slot`, an empty one where there is none: to read a slot while the one before it is added up."""
    address = tl.load(slots + 2 * index, mask=index < num_slots, other=0)
    rest = tl.load(slots + 2 * index + 1, mask=index < num_slots, other=0)
    return address, (rest & 0x7FFFFFFF).to(tl.int32), rest


@triton.jit
def fold_elements(
    square, total, top, bad, address, count, kind, DTYPE: tl.constexpr, WHAT: tl.constexpr, TILE: tl.constexpr
):
    """Folds up to one tile of elements at any alignment."""
    words = read_elements_below(address, tl.arange(0, TILE), count, kind)
    if DTYPE != MIXED:
        square, total, top, bad = fold_one(square, total, top, bad, words, DTYPE, WHAT)
    else:
        if kind == BY_ELEMENT + FLOAT32:
            square, total, top, bad = fold_one(square, total, top, bad, words, FLOAT32, WHAT)
        elif kind == BY_ELEMENT + FLOAT16:
            square, total, top, bad = fold_one(square, total, top, bad, words, FLOAT16, WHAT)
        else:
            square, total, top, bad = fold_one(square, total, top, bad, words, BFLOAT16, WHAT)
    return square, total, top, bad


@triton.jit
def fold_chunk(
    square,
    total,
    top,
    bad,
    address,
    count,
    kind,
    DTYPE: tl.constexpr,
    WHAT: tl.constexpr,
    TILE: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Folds `count` words from a 16-byte aligned address, eight tiles at a time."""
    lanes = tl.arange(0, TILE)
    num_full = count // (8 * TILE)
    for _ in range(num_full):
        w0 = read_words(address, lanes, POLICY)
        w1 = read_words(address, lanes + TILE, POLICY)
        w2 = read_words(address, lanes + 2 * TILE, POLICY)
        w3 = read_words(address, lanes + 3 * TILE, POLICY)
        w4 = read_words(address, lanes + 4 * TILE, POLICY)
        w5 = read_words(address, lanes + 5 * TILE, POLICY)
        w6 = read_words(address, lanes + 6 * TILE, POLICY)
        w7 = read_words(address, lanes + 7 * TILE, POLICY)
        square, total, top, bad = fold(square, total, top, bad, w0, w1, w2, w3, w4, w5, w6, w7, kind, DTYPE, WHAT)
        address += 32 * TILE
    left = count - num_full * (8 * TILE)
    if left > 0:
        w0 = read_words_below(address, lanes, left)
        w1 = read_words_below(address, lanes + TILE, left)
        w2 = read_words_below(address, lanes + 2 * TILE, left)
        w3 = read_words_below(address, lanes + 3 * TILE, left)
        w4 = read_words_below(address, lanes + 4 * TILE, left)
        w5 = read_words_below(address, lanes + 5 * TILE, left)
        w6 = read_words_below(address, lanes + 6 * TILE, left)
        w7 = read_words_below(address, lanes + 7 * TILE, left)
        square, total, top, bad = fold(square, total, top, bad, w0, w1, w2, w3, w4, w5, w6, w7, kind, DTYPE, WHAT)
    return square, total, top, bad


@triton.jit
def fold_slot(address, count, kind, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """One slot of any class, lane by lane: sum of squares, sum, bits of the largest magnitude, non-finite values."""
    square = tl.zeros((TILE,), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    top = tl.zeros((TILE,), tl.int32)
    bad = tl.zeros((TILE,), tl.int32)
    if kind < BY_ELEMENT:
        square, total, top, bad = fold_chunk(square, total, top, bad, address, count, kind, DTYPE, ALL, TILE, "")
    else:
        square, total, top, bad = fold_elements(square, total, top, bad, address, count, kind, DTYPE, ALL, TILE)
    return square, total, top, bad
