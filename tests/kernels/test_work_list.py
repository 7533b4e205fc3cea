"""Every element of every gradient is in one slot, and in one only."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from perfdoctor.kernels.work_list import BY_ELEMENT, MIXED, PACK, TILE, WorkList, cut

ITEM_BYTES = (4, 2, 2)
gradients = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.one_of(st.integers(0, 40), st.integers(1000, 1100), st.integers(8000, 70_000)),
        st.integers(0, 7),  # elements off a 16-byte boundary
    ),
    max_size=20,
)


def cut_at(chosen: list[tuple[int, int, int]], words: int | None) -> tuple[WorkList, np.ndarray]:
    addresses = [(1 << 20) * (t + 1) + shift * ITEM_BYTES[kind] for t, (kind, _, shift) in enumerate(chosen)]
    columns = [
        np.array(column, dtype=np.int64) for column in (addresses, [c[1] for c in chosen], [c[0] for c in chosen])
    ]
    return cut(*columns, words), columns[0]


@given(gradients, st.sampled_from([None, PACK * TILE, 2 * PACK * TILE]))
def test_slots_cover_every_element_once(chosen: list[tuple[int, int, int]], words: int | None) -> None:
    work, addresses = cut_at(chosen, words)
    slots = work.slots_at(addresses)
    seen: list[list[tuple[int, int]]] = [[] for _ in chosen]
    for (address, rest), tensor in zip(slots.tolist(), work.tensor.tolist(), strict=True):
        count, kind = rest & 0x7FFFFFFF, (rest >> 32) & 0xFF
        if count == 0:
            continue
        element = chosen[tensor][0]
        assert kind & 3 == element
        if kind < BY_ELEMENT:
            assert address % 16 == 0
            assert count % 4 == 0
        else:
            assert count <= TILE
        size = 4 if kind < BY_ELEMENT else ITEM_BYTES[element]
        seen[tensor].append((address - int(addresses[tensor]), count * size))
    for (element, elements, _), pieces in zip(chosen, seen, strict=True):
        end = 0
        for start, length in sorted(pieces):
            assert start == end
            end += length
        assert end == elements * ITEM_BYTES[element]


@given(gradients)
def test_parts_of_a_gradient_follow_each_other(chosen: list[tuple[int, int, int]]) -> None:
    work, _ = cut_at(chosen, None)
    used = work.rest & 0x7FFFFFFF > 0
    numbers = (work.rest >> 40)[used]
    assert sorted(numbers.tolist()) == list(range(work.num_parts))
    for number, tensor in zip(numbers.tolist(), work.tensor[used].tolist(), strict=True):
        assert work.first_part[tensor] <= number < work.first_part[tensor + 1]


@given(gradients)
def test_packs_are_whole_and_of_one_class(chosen: list[tuple[int, int, int]]) -> None:
    work, _ = cut_at(chosen, None)
    packed = work.rest[work.num_chunks :]
    assert len(packed) % PACK == 0
    kinds = ((packed >> 32) & 0xFF).reshape(-1, PACK)
    assert (kinds == kinds[:, :1]).all()
    assert work.num_items == work.num_chunks + len(packed) // PACK


def test_one_huge_and_many_tiny_are_balanced() -> None:
    work, _ = cut_at([(0, 30_000_000, 0)] + [(0, 8, 0)] * 4000, None)
    counts = (work.rest & 0x7FFFFFFF)[: work.num_chunks]
    assert work.num_chunks == -(-30_000_000 // (PACK * TILE))
    assert counts.max() == PACK * TILE  # no chunk is longer than the others
    assert work.num_items - work.num_chunks == 500


@given(gradients, st.integers(1, 40))
def test_chunks_for_so_many_programs_cover_the_same(chosen: list[tuple[int, int, int]], programs: int) -> None:
    work, addresses = cut_at(chosen, 2 * PACK * TILE)
    columns = [np.array([c[index] for c in chosen], dtype=np.int64) for index in (1, 0)]
    even = cut(addresses, *columns, 2 * PACK * TILE, programs)
    assert even.num_elements.tolist() == work.num_elements.tolist()
    for tensor in range(len(chosen)):
        totals = [
            int((each.rest & 0x7FFFFFFF)[(each.tensor == tensor) & ((each.rest >> 32) & 0xFF == kind)].sum())
            for each in (work, even)
            for kind in range(7)
        ]
        assert totals[:7] == totals[7:]
    assert (even.rest & 0x7FFFFFFF)[: even.num_chunks].max(initial=0) <= 2 * PACK * TILE


def test_programs_get_equal_shares() -> None:
    columns = (np.array([256]), np.array([14_400 * PACK * TILE]), np.array([0]))
    work = cut(*(column.astype(np.int64) for column in columns), 10 * PACK * TILE, 100)  # 14.4 rounds of 100
    counts = work.rest & 0x7FFFFFFF
    shares = np.bincount(np.arange(work.num_chunks) % 100, weights=counts[: work.num_chunks])
    assert shares.max() / shares.mean() < 1.005


def test_leading_chunks() -> None:
    work, _ = cut_at([(0, 4 * PACK * TILE, 0)], PACK * TILE)  # four chunks of 32 KiB
    assert [work.num_leading_chunks(size) for size in (0, 32_767, 32_768, 100_000, 1e9)] == [0, 0, 1, 3, 4]


def test_sizes_beyond_32_bits() -> None:
    elements = (1 << 33) + 5
    columns = (np.array([256]), np.array([elements]), np.array([2]))
    work = cut(*(column.astype(np.int64) for column in columns))
    words = work.rest & 0x7FFFFFFF
    by_element = (work.rest >> 32) & 0xFF >= BY_ELEMENT
    assert 2 * int(words[~by_element].sum()) + int(words[by_element].sum()) == elements
    assert int(work.offset.max()) > 1 << 33


def test_types() -> None:
    assert cut_at([(1, 5, 0), (1, 7, 0)], None)[0].element == 1
    assert cut_at([(1, 5, 0), (2, 0, 0)], None)[0].element == 1  # an empty gradient has no elements to read
    assert cut_at([(1, 5, 0), (2, 7, 0)], None)[0].element == MIXED
