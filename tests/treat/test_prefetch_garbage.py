"""What is left of a prefetcher that is dropped, with the garbage collector off: nothing may wait for it.

Pinned and device memory that waits for the collector is memory the loop lacks; and a worker process that is forked
meanwhile inherits it, collects it there, and is aborted by CUDA.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import perfdoctor
from perfdoctor.treat import prefetch
from perfdoctor.treat.prefetch import DevicePrefetcher


def batches(count: int, bad: int | None = None) -> Iterator[torch.Tensor]:
    for number in range(count):
        if number == bad:
            raise ValueError("damaged")
        yield torch.full((8,), float(number))


class Unmovable:
    def to(self, device: Any) -> Any:
        raise RuntimeError("cannot be moved")


def all_of_it() -> None:
    list(DevicePrefetcher(batches(5), "cuda"))


def left_after(count: int) -> Callable[[], None]:
    def leave() -> None:
        for number, _ in enumerate(DevicePrefetcher([torch.ones(8) for _ in range(4)], "cuda"), 1):
            if number == count:
                break

    return leave


def left_before_the_error() -> None:
    for _ in DevicePrefetcher(batches(3, bad=2), "cuda"):
        break


def loader_that_fails() -> None:
    with pytest.raises(ValueError, match="damaged"):
        list(DevicePrefetcher(batches(5, bad=3), "cuda"))


def batch_that_fails() -> None:
    with pytest.raises(RuntimeError, match="cannot be moved"):
        list(DevicePrefetcher([torch.ones(8), (torch.ones(8), Unmovable())], "cuda"))


def step_that_is_interrupted() -> None:
    try:
        for _ in DevicePrefetcher(batches(5), "cuda"):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass


@pytest.mark.parametrize(
    "use",
    [
        all_of_it, left_after(1), left_after(2), left_after(3), left_after(4), left_before_the_error,
        loader_that_fails, batch_that_fails, step_that_is_interrupted,
    ],
)  # fmt: skip
def test_nothing_waits_for_the_garbage_collector(use: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    class Followed(prefetch._Pipeline):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.extend([weakref.ref(self), *(weakref.ref(slot) for slot in self.ring.slots)])

    monkeypatch.setattr(prefetch, "_Pipeline", Followed)
    gc.collect()
    gc.disable()
    try:
        with perfdoctor.emulate_cuda():
            use()
        assert len(made) == 5
        assert [ref() for ref in made] == [None] * 5
    finally:
        gc.enable()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_has_a_ring_of_its_own(duplicate: Callable[[Any], Any]) -> None:
    with perfdoctor.emulate_cuda():
        first = DevicePrefetcher([torch.full((2,), float(n)) for n in range(5)], "cuda", depth=3)
        kept = list(first)
        second = duplicate(first)
        assert second.depth == 3
        assert [int(x[0].cpu()) for x in second] == [0, 1, 2, 3, 4]
        assert [int(x[0].cpu()) for x in kept] == [0, 1, 2, 3, 4]
        assert not set(map(id, first._idle)) & set(map(id, second._idle))
