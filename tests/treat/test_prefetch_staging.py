"""Staging by threads: every byte arrives, whatever the layout; no thread outlives `close`."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perfdoctor.treat import staging
from perfdoctor.treat.staging import Stager, num_threads


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3_000_001), max_size=4), st.integers(1, 5))
def test_all_bytes_arrive(sizes: list[int], threads: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "num_threads", lambda: threads)
        sources = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
        targets = [torch.zeros_like(source) for source in sources]
        stager = Stager()
        job = stager.start(list(zip(targets, sources, strict=True)))
        job.wait()
        assert job.done
        stager.close()
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))


@pytest.mark.parametrize("size", [10, 600])
def test_other_strides_and_conjugates_are_copied_by_value(size: int) -> None:
    source = torch.randn(size, size, dtype=torch.complex64).t().conj()
    target = torch.empty(size, size, dtype=torch.complex64)
    stager = Stager()
    stager.start([(target, source)]).wait()
    stager.close()
    assert torch.equal(target, source)


def test_a_copy_that_fails_is_raised_where_it_is_waited_for_and_the_threads_go_on() -> None:
    source = torch.ones(1000, 1000).t()
    stager = Stager()
    job = stager.start([(torch.empty(3, 3), source)])
    with pytest.raises(RuntimeError, match="size"):
        job.wait()
    assert not job.done
    target = torch.empty(1000, 1000)
    stager.start([(target, source)]).wait()
    assert torch.equal(target, source)
    stager.close()


def test_threads_are_started_when_needed_joined_by_close_and_started_again() -> None:
    before = threading.active_count()
    stager = Stager()
    small, big = torch.ones(8), torch.ones(1 << 20)
    stager.start([(torch.empty(8), small)]).wait()
    assert threading.active_count() == before
    for _ in range(2):
        target = torch.zeros(1 << 20)
        job = stager.start([(target, big)])
        assert threading.active_count() == before + num_threads()
        stager.close()
        assert job.done
        assert torch.equal(target, big)
        assert threading.active_count() == before
