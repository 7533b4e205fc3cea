"""Cuts a list of gradients into pieces of work for the kernels of `grad_stats_triton` and grad_stats.cu.

A slot is one piece: a run of 4-byte words from a 16-byte aligned address, or up to TILE elements at any alignment.
Large gradients become chunks of equal length; a gradient that starts or ends off a 16-byte boundary gives its ragged
ends as pieces of their own; small gradients and ends are packed by eight. Chunks come first, in the order of the list,
and the small packs fill the end of the launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

TILE = 1024
"""Words that the threads of one program read in one 16-byte load each (8 warps)."""
PACK = 8
BY_ELEMENT = 4
MIXED = 3
_GROUP = PACK * TILE
_STEP = TILE // 4  # chunks are cut to multiples of 1 KiB
_ITEM_BYTES = np.array([4, 2, 2], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkList:
    """Where the slots lie relative to their gradients; the addresses are filled in by `slots_at`."""

    tensor: Ints
    """[num_slots] the gradient of each slot"""
    offset: Ints
    """[num_slots] bytes from the gradient's first element"""
    rest: Ints
    """[num_slots] count | class << 32 | part << 40"""
    num_chunks: int
    first_part: Ints
    """[num_tensors + 1] gradient t owns the parts first_part[t] to first_part[t + 1] - 1"""
    num_elements: Ints
    """[num_tensors]"""
    element: int
    """0 float32, 1 float16, 2 bfloat16: the only type there is; 3 where types are mixed"""

    @property
    def num_slots(self) -> int:
        return len(self.tensor)

    @property
    def num_items(self) -> int:
        """Chunks, and packs of eight slots."""
        return self.num_chunks + (self.num_slots - self.num_chunks) // PACK

    def num_leading_chunks(self, num_bytes: float) -> int:
        """How many chunks from the front fit into so many bytes."""
        ends = 4 * np.cumsum(self.rest[: self.num_chunks] & 0x7FFFFFFF)
        return int(np.searchsorted(ends, num_bytes, side="right"))

    @property
    def num_parts(self) -> int:
        return int(self.first_part[-1])

    def slots_at(self, addresses: Ints) -> Ints:
        """The slot table int64 [num_slots, 2] for gradients at these addresses (aligned as those it was cut for)."""
        return np.stack((addresses[self.tensor] + self.offset, self.rest), axis=1)


def chunk_words(total_bytes: int) -> int:
    """Words a chunk: short enough that every program gets several, long enough that reading a slot does not show."""
    if total_bytes < 256e6:
        return _GROUP
    if total_bytes < 2e9:
        return 2 * _GROUP
    return 8 * _GROUP


def cut(
    addresses: Ints, num_elements: Ints, elements: Ints, words: int | None = None, programs: int | None = None
) -> WorkList:
    """Cuts gradients of `num_elements[t]` elements of type `elements[t]` (0, 1, 2) at `addresses[t]`.

    `words` is the length of a chunk, by default what `chunk_words` says; with `programs`, it becomes as much shorter as
    it takes to give each of so many programs the same number of chunks.
    """
    num_bytes = num_elements * _ITEM_BYTES[elements]
    words = words or chunk_words(int(num_bytes.sum()))
    runs, ends = _split_ends(addresses, num_elements, elements, num_bytes)
    large = runs[runs[:, 2] > TILE]
    chunks = _split_chunks(large, words)
    if programs is not None:
        even = _split_chunks(large, _even_words(large[:, 2], words, programs))
        chunks = min(chunks, even, key=lambda pieces: _largest_share(pieces, programs))
    small = runs[runs[:, 2] <= TILE]
    packed = [_padded(group) for group in (*_by_class(small), *_by_class(ends))]
    table = np.concatenate([chunks, *packed])
    part, first_part = _number_parts(table, len(addresses))
    kinds = np.unique(elements[num_elements > 0])
    return WorkList(
        tensor=table[:, 0],
        offset=table[:, 1],
        rest=table[:, 2] | (table[:, 3] << 32) | (part << 40),
        num_chunks=len(chunks),
        first_part=first_part,
        num_elements=num_elements,
        element=int(kinds[0]) if len(kinds) == 1 else MIXED,
    )


def _pieces(tensor: Ints, offset: Ints, count: Ints, kind: Ints) -> Ints:
    """[n, 4]: gradient, byte offset, words or elements, class."""
    return np.stack((tensor, offset, count, kind), axis=1)


def _split_ends(addresses: Ints, num_elements: Ints, elements: Ints, num_bytes: Ints) -> tuple[Ints, Ints]:
    """Aligned runs (count in words), and what is read by element (count in elements)."""
    tensor = np.arange(len(addresses), dtype=np.int64)
    item = _ITEM_BYTES[elements]
    aligned = (addresses % 16 == 0) & (num_bytes % 16 == 0)
    whole = ~aligned & (num_elements <= TILE)  # one slot is cheaper than a head, a run and a tail
    head = np.where(whole, num_bytes, np.minimum(-addresses % 16, num_bytes))
    run = (num_bytes - head) // 16 * 16
    tail = num_bytes - head - run
    by_element = elements + BY_ELEMENT
    pieces = np.concatenate(
        (
            _pieces(tensor, np.zeros_like(head), head // item, by_element),
            _pieces(tensor, head + run, tail // item, by_element),
        )
    )
    runs = _pieces(tensor, head, run // 4, elements)
    return runs[run > 0], pieces[pieces[:, 2] > 0]


def _even_words(lengths: Ints, words: int, programs: int) -> int:
    """A chunk length of at most `words` that makes whole rounds of chunks for `programs`.

    GPT-2 124M in chunks of 64 KiB is 14.4 rounds of 528: 4 % more for those that get 15 chunks.
    """
    total = int(lengths.sum())
    rounds = -(-(total // words + len(lengths)) // programs)
    chunks = rounds * programs - len(lengths)  # every run may end in a shorter one
    if rounds < 2 or chunks <= 0:
        return words
    return min(words, -(-total // (chunks * _STEP)) * _STEP)


def _largest_share(chunks: Ints, programs: int) -> int:
    """Words of the program that gets most, when each takes every `programs`-th chunk."""
    shares = np.bincount(np.arange(len(chunks)) % programs, weights=chunks[:, 2], minlength=1)
    return int(shares.max())


def _split_chunks(runs: Ints, words: int) -> Ints:
    """Runs cut into chunks of `words`."""
    per_run = -(-runs[:, 2] // words)
    chunks = np.repeat(runs, per_run, axis=0)
    before = np.repeat(np.cumsum(per_run) - per_run, per_run)
    number = np.arange(len(chunks), dtype=np.int64) - before
    chunks[:, 1] += number * words * 4
    chunks[:, 2] = np.minimum(words, chunks[:, 2] - number * words)
    return chunks


def _by_class(pieces: Ints) -> list[Ints]:
    return [pieces[pieces[:, 3] == kind] for kind in np.unique(pieces[:, 3])]


def _padded(pieces: Ints) -> Ints:
    """Filled up to a multiple of eight with empty slots of the same class."""
    missing = -len(pieces) % PACK
    filler = np.repeat(pieces[:1], missing, axis=0)
    filler[:, 2] = 0
    return np.concatenate((pieces, filler))


def _number_parts(table: Ints, num_tensors: int) -> tuple[Ints, Ints]:
    """A number for each slot's part, so that the parts of a gradient follow each other; and each gradient's first."""
    used = table[:, 2] > 0
    first_part = np.zeros(num_tensors + 1, dtype=np.int64)
    np.cumsum(np.bincount(table[used, 0], minlength=num_tensors), out=first_part[1:])
    part = np.zeros(len(table), dtype=np.int64)
    order = np.flatnonzero(used)[np.argsort(table[used, 0], kind="stable")]
    part[order] = np.arange(len(order), dtype=np.int64)
    return part, first_part
