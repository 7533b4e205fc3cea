"""The Triton kernel that scales all gradients in place.

gradient *= coefficient
"""

# mypy: ignore-errors
# Triton reads these functions itself: its tensors have no types that mypy knows.

from __future__ import annotations

import triton
import triton.language as tl

from perfdoctor.kernels.triton_words import (
    BFLOAT16,
    BY_ELEMENT,
    FLOAT16,
    FLOAT32,
    MIXED,
    high_value,
    low_value,
    read_elements_below,
    read_slot,
)


@triton.jit
def _half_bits(x, DTYPE: tl.constexpr):
    """float32 rounded to the two-byte type, as its 16 bits in an int32."""
    if DTYPE == BFLOAT16:
        return x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _scaled_as(word, factor, DTYPE: tl.constexpr):
    if DTYPE == FLOAT32:
        return (low_value(word, DTYPE) * factor).to(tl.int32, bitcast=True)
    else:
        return _half_bits(low_value(word, DTYPE) * factor, DTYPE) | (
            _half_bits(high_value(word, DTYPE) * factor, DTYPE) << 16
        )


@triton.jit
def _scaled(word, factor, kind, DTYPE: tl.constexpr):
    """The word with its elements times the factor, in float32, rounded to their type."""
    if DTYPE != MIXED:
        word = _scaled_as(word, factor, DTYPE)
    else:
        if kind == FLOAT32:
            word = _scaled_as(word, factor, FLOAT32)
        elif kind == FLOAT16:
            word = _scaled_as(word, factor, FLOAT16)
        else:
            word = _scaled_as(word, factor, BFLOAT16)
    return word


@triton.jit
def _scale_chunk(address, count, kind, factor, DTYPE: tl.constexpr, SPAN: tl.constexpr, STORE: tl.constexpr):
    """Scales `count` words in place, SPAN at a time: all of a thread's loads are in flight before its first store."""
    lanes = tl.arange(0, SPAN)
    for start in range(0, count, SPAN):
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16) + lanes
        here = lanes // 4 < (count - start) // 4  # in groups of four words, so that a 16-byte load is masked as a whole
        words = tl.load(pointer, mask=here)
        tl.store(pointer, _scaled(words, factor, kind, DTYPE), mask=here, cache_modifier=STORE)
        address += 4 * SPAN


@triton.jit
def _scale_elements(address, count, kind, factor, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """Scales up to one tile of elements at any alignment."""
    lanes = tl.arange(0, TILE)
    words = read_elements_below(address, lanes, count, kind)
    scaled = _scaled(words, factor, kind & 3, DTYPE)
    if kind == BY_ELEMENT:
        tl.store(address.to(tl.pointer_type(tl.int32)) + lanes, scaled, mask=lanes < count)
    else:
        tl.store(address.to(tl.pointer_type(tl.int16)) + lanes, scaled.to(tl.int16), mask=lanes < count)


@triton.jit(do_not_specialize=["num_slots"])
def scale_kernel(
    slots, coefficient, num_slots, DTYPE: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, STORE: tl.constexpr
):
    """gradient *= coefficient, in place; returns at once where the coefficient is 1 or more (a NaN is neither).

    Slots go backwards: what the norm has read last is still in the L2 cache. STORE: the stores' cache modifier.
    """
    factor = tl.load(coefficient)
    if not (factor >= 1.0):
        for behind in range(tl.program_id(0), num_slots, tl.num_programs(0)):
            address, count, rest = read_slot(slots, num_slots - 1 - behind)
            kind = ((rest >> 32) & 0xFF).to(tl.int32)
            if kind < BY_ELEMENT:
                _scale_chunk(address, count, kind, factor, DTYPE, SPAN, STORE)
            else:
                _scale_elements(address, count, kind, factor, DTYPE, TILE)
