"""The order that streams and events enforce, followed as vector clocks: no copy may overtake a read, no read a copy.

On the emulated device work runs at once, which would hide a missing wait. Here each stream carries a clock of what is
known to be over when its next work starts; recording takes it along, waiting merges it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import perfdoctor
from perfdoctor.emulate import streams
from perfdoctor.treat.batch_slots import Slot
from perfdoctor.treat.prefetch import DevicePrefetcher

Clock = dict[int, int]  # stream -> how much of its work


class Order:
    """Clocks of all streams, and who last wrote and read each piece of device memory."""

    def __init__(self) -> None:
        self.clocks: dict[int, Clock] = {}
        self.recorded: dict[int, Clock] = {}
        self.reads: dict[int, list[tuple[int, int]]] = {}
        self.writes: dict[int, tuple[int, int]] = {}

    def of(self, stream: Any) -> Clock:
        return self.clocks.setdefault(id(stream), {id(stream): 0})

    def work(self, stream: Any) -> tuple[int, int]:
        """New work on a stream, as the moment that it stands for."""
        clock = self.of(stream)
        clock[id(stream)] += 1
        return id(stream), clock[id(stream)]

    def record(self, event: Any, stream: Any) -> None:
        self.recorded[id(event)] = dict(self.of(stream))

    def wait(self, stream: Any, event: Any) -> None:
        self.merge(stream, self.recorded.get(id(event), {}))

    def merge(self, stream: Any, known: Clock) -> None:
        clock = self.of(stream)
        for other, moment in known.items():
            clock[other] = max(clock.get(other, 0), moment)

    def is_before(self, moment: tuple[int, int], stream: Any) -> bool:
        return self.of(stream).get(moment[0], 0) >= moment[1]

    def write(self, address: int, stream: Any) -> None:
        for read in self.reads.pop(address, []):
            assert self.is_before(read, stream), "a copy may overtake a kernel that reads the batch before"
        self.writes[address] = self.work(stream)

    def read(self, address: int, stream: Any) -> None:
        assert self.is_before(self.writes[address], stream), "a kernel may read a batch that is not there yet"
        self.reads.setdefault(address, []).append(self.work(stream))


@contextmanager
def followed() -> Iterator[Order]:
    """The emulated device with clocks."""
    seen = Order()
    copy_ = torch.Tensor.copy_

    def copying(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if self.is_cuda:
            assert non_blocking
            assert source.is_pinned()
            seen.write(self.data_ptr(), torch.cuda.current_stream())
        return copy_(self, source, non_blocking)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copying)
        patch.setattr(streams.Event, "record", lambda event, stream: seen.record(event, stream))
        patch.setattr(streams.Stream, "wait_event", lambda stream, event: seen.wait(stream, event))
        with perfdoctor.emulate_cuda():
            yield seen
            torch.cuda.set_stream(streams.DEFAULT)


Plan = list[tuple[int, int]]  # for each batch: for how many steps it is kept and read; on which stream its step runs


def run_loop(order: Order, plan: Plan, depth: int) -> None:
    """Two epochs; each step reads its batch and those that are kept."""
    own = [torch.cuda.Stream() for _ in range(3)]
    prefetcher = DevicePrefetcher([torch.ones(4) for _ in plan], "cuda", depth)
    torch.cuda.set_stream(own[0])
    for _ in range(2):
        kept: list[tuple[int, torch.Tensor]] = []
        for i, batch in enumerate(prefetcher):
            current = torch.cuda.current_stream()
            kept.append((i + plan[i][0], batch))
            for _, tensor in kept:
                order.read(tensor.data_ptr(), current)
            kept = [entry for entry in kept if entry[0] > i]
            following = own[plan[i][1]]
            order.merge(following, order.of(current))  # what who changes streams owes: `following.wait_stream(current)`
            torch.cuda.set_stream(following)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 6), st.just(0)), max_size=16), st.integers(1, 3))
def test_one_stream(plan: Plan, depth: int) -> None:
    with followed() as order:
        run_loop(order, plan, depth)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=16), st.integers(1, 3))
def test_a_loop_that_changes_its_stream(plan: Plan, depth: int) -> None:
    with followed() as order:
        run_loop(order, plan, depth)


def test_the_clocks_see_a_wait_that_is_missing() -> None:
    plan = [(0, 0)] * 12
    for event, words in (("free", "overtake"), ("copied", "not there yet")):
        with followed() as order:
            forgotten = streams.Stream.wait_event

            def wait(stream: Any, waited: Any, event: str = event, forgotten: Any = forgotten) -> None:
                names = [name for slot in _slots() for name in ("free", "copied") if getattr(slot, name) is waited]
                if event not in names:
                    forgotten(stream, waited)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(streams.Stream, "wait_event", wait)
                with pytest.raises(AssertionError, match=words):
                    run_loop(order, plan, 2)


def _slots() -> list[Slot]:
    return [thing for thing in gc.get_objects() if type(thing) is Slot]
