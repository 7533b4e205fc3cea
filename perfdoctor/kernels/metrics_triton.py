"""The Triton kernels behind `DeviceMetrics` and `NonFiniteWatch`: one program each, a few microseconds.

They are all launch: what counts is that there is one of them, whatever the number of metrics or parameters.
"""

# mypy: ignore-errors
# Triton reads these functions itself: its tensors have no types that mypy knows.

from __future__ import annotations

import triton
import triton.language as tl

from perfdoctor.kernels.metrics_reference import COLUMNS, DECAY_ROW, FLIP, LANES, RECORD, ROWS

_COLUMNS = tl.constexpr(COLUMNS)
_DECAY_ROW = tl.constexpr(DECAY_ROW)
_FLIP = tl.constexpr(FLIP)
_LANES = tl.constexpr(LANES)
_SIZE = tl.constexpr(ROWS * COLUMNS)
_RECORD = tl.constexpr(RECORD)


@triton.jit
def _number(value, IS_NUMBER: tl.constexpr):
    """float64: what a pointer points at, or the number whose flipped bits `value` is."""
    if IS_NUMBER:
        return (value.to(tl.int64) ^ _FLIP).to(tl.float64, bitcast=True)
    else:
        return tl.load(value).to(tl.float64)


@triton.jit
def _put(x, rows, value, LANE: tl.constexpr, PLACES: tl.constexpr, NUMBERS: tl.constexpr):
    """Lane LANE gets its value and its row: eight bits of PLACES."""
    here = tl.arange(0, _LANES) == LANE
    x = tl.where(here, _number(value, (NUMBERS >> LANE) & 1), x)
    return x, tl.where(here, (PLACES >> (8 * LANE)) & 255, rows)


@triton.jit
def _put_four(x, rows, a, b, c, d, LANE: tl.constexpr, PLACES: tl.constexpr, NUMBERS: tl.constexpr, NUM: tl.constexpr):
    """Lanes LANE to LANE + 3, as far as there are NUM."""
    if NUM > LANE:
        x, rows = _put(x, rows, a, LANE, PLACES, NUMBERS)
    if NUM > LANE + 1:
        x, rows = _put(x, rows, b, LANE + 1, PLACES, NUMBERS)
    if NUM > LANE + 2:
        x, rows = _put(x, rows, c, LANE + 2, PLACES, NUMBERS)
    if NUM > LANE + 3:
        x, rows = _put(x, rows, d, LANE + 3, PLACES, NUMBERS)
    return x, rows


@triton.jit(do_not_specialize=["weight", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11",
                               "v12", "v13", "v14", "v15"])  # fmt: skip
def metrics_kernel(state, snapshot, weight, v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
                   PLACES: tl.constexpr, NUMBERS: tl.constexpr, NUM: tl.constexpr,
                   WEIGHT_IS_NUMBER: tl.constexpr):  # fmt: skip
    """Adds NUM values to their rows of state float64 [ROWS, COLUMNS], then copies all of it to snapshot.

    Bit k of NUMBERS says that value k is a number (its bits) and no pointer.
    """
    lanes = tl.arange(0, _LANES)
    x = tl.zeros((_LANES,), tl.float64)
    rows = tl.zeros((_LANES,), tl.int32)
    x, rows = _put_four(x, rows, v0, v1, v2, v3, 0, PLACES, NUMBERS, NUM)
    x, rows = _put_four(x, rows, v4, v5, v6, v7, 4, PLACES, NUMBERS, NUM)
    x, rows = _put_four(x, rows, v8, v9, v10, v11, 8, PLACES, NUMBERS, NUM)
    x, rows = _put_four(x, rows, v12, v13, v14, v15, 12, PLACES, NUMBERS, NUM)
    by = _number(weight, WEIGHT_IS_NUMBER)
    used = lanes < NUM
    row = state + rows * _COLUMNS
    decay = tl.load(state + _DECAY_ROW * _COLUMNS)
    total = tl.load(row, mask=used, other=0.0)
    weights = tl.load(row + 1, mask=used, other=0.0)
    low = tl.load(row + 3, mask=used, other=0.0)
    high = tl.load(row + 4, mask=used, other=0.0)
    ema = tl.load(row + 5, mask=used, other=0.0)
    ema_weight = tl.load(row + 6, mask=used, other=0.0)
    count = tl.load(row + 7, mask=used, other=0.0)
    tl.store(row, total + by * x, mask=used)
    tl.store(row + 1, weights + by, mask=used)
    tl.store(row + 2, x, mask=used)
    tl.store(row + 3, tl.where((x < low) | (x != x), x, low), mask=used)  # a NaN in `low` stays: nothing is below it
    tl.store(row + 4, tl.where((x > high) | (x != x), x, high), mask=used)
    tl.store(row + 5, ema * decay + x * (1.0 - decay), mask=used)
    tl.store(row + 6, ema_weight * decay + (1.0 - decay), mask=used)
    tl.store(row + 7, count + 1.0, mask=used)
    tl.debug_barrier()  # every thread's rows are in memory before any thread copies them
    cells = tl.arange(0, _SIZE)
    tl.store(snapshot + cells, tl.load(state + cells))


@triton.jit
def note(record, found, loss, excuse, counts, num_tensors, check, HAS_LOSS: tl.constexpr, EXCUSE: tl.constexpr,
         SPAN: tl.constexpr):  # fmt: skip
    """Notes in record int64 [RECORD] the first check since it was cleared that saw a non-finite value.

    `counts` int64 [num_tensors]: non-finite values of each gradient, read past an L1 that may be stale. EXCUSE 1:
    gradients do not count where excuse [] is above zero (an optimizer's found_inf); 2: where it is at least one (a
    GradScaler's scale). found [] gets 1.0 once the record holds something. Gives the number of gradients with such
    values.
    """
    lanes = tl.arange(0, SPAN)
    first = tl.full((SPAN,), 1 << 40, tl.int64)
    bad_tensors = tl.zeros((SPAN,), tl.int64)
    bad_values = tl.zeros((SPAN,), tl.int64)
    for at in range(0, num_tensors, SPAN):
        count = tl.load(counts + at + lanes, mask=at + lanes < num_tensors, other=0, cache_modifier=".cg")
        hit = count > 0
        first = tl.minimum(first, tl.where(hit, (at + lanes).to(tl.int64), 1 << 40))
        bad_tensors += hit.to(tl.int64)
        bad_values += count
    index = tl.min(first, 0)
    num_bad = tl.sum(bad_tensors, 0)
    num_values = tl.sum(bad_values, 0)
    is_excused = num_bad < 0
    if EXCUSE == 1:
        is_excused = (num_bad > 0) & (tl.load(excuse).to(tl.float32) > 0.0)
    if EXCUSE == 2:
        is_excused = (num_bad > 0) & (tl.load(excuse).to(tl.float32) >= 1.0)
    is_bad = (num_bad > 0) & (is_excused == 0)
    at_index = tl.load(counts + index, mask=num_bad > 0, other=0, cache_modifier=".cg")
    if HAS_LOSS:
        value = tl.load(loss).to(tl.float64)
        bad_loss = (value != value) | (tl.abs(value) == float("inf"))
        index = tl.where(bad_loss, -1, index)
        at_index = tl.where(bad_loss, 1, at_index)
        is_bad = is_bad | bad_loss
    seen = tl.load(record)
    is_first = is_bad & (seen == 0)
    tl.store(record + 1, check.to(tl.int64), mask=is_first)
    tl.store(record + 2, index, mask=is_first)
    tl.store(record + 3, at_index, mask=is_first)
    tl.store(record + 4, num_bad, mask=is_first)
    tl.store(record + 5, num_values, mask=is_first)
    tl.store(record + 6, tl.load(record + 6) + is_excused.to(tl.int64))
    now = seen + is_bad.to(tl.int64)
    tl.store(record, now)
    tl.store(found, (now > 0).to(tl.float32))
    return num_bad


@triton.jit(do_not_specialize=["counts", "num_tensors", "loss", "excuse", "check"])
def nonfinite_kernel(
    record,
    found,
    counts,
    num_tensors,
    loss,
    excuse,
    check,
    HAS_LOSS: tl.constexpr,
    EXCUSE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """`note` for counts that are there already, or none."""
    note(record, found, loss, excuse, counts, num_tensors, check, HAS_LOSS, EXCUSE, SPAN)


@triton.jit
def take_kernel(record, snapshot, found):
    """Copies record int64 [RECORD] to snapshot and clears it, and found []."""
    cells = tl.arange(0, _RECORD)
    values = tl.load(record + cells)
    tl.store(snapshot + cells, values)
    tl.store(record + cells, values * 0)
    tl.store(found, 0.0)
