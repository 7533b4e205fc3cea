"""What share of a fetch is computed: of samples that wait, and of samples that compute, here and in a worker."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from perfdoctor.watch import fetch_cpu
from perfdoctor.watch.fetch_cpu import FetchCpu


class Samples(Dataset[int]):
    """Of 4 ms each."""

    def __init__(self, computed: bool) -> None:
        self.computed = computed

    def __len__(self) -> int:
        return 24

    def __getitem__(self, at: int) -> int:
        if self.computed:
            end = time.thread_time() + 0.004
            while time.thread_time() < end:
                pass
        else:
            time.sleep(0.004)
        return at


def fetched(loader: Any, pause_s: float = 0.0) -> tuple[FetchCpu, list[int]]:
    fetches = FetchCpu()
    iterator, found = iter(loader), []
    while True:
        try:
            found += fetches.fetched(iterator, lambda: next(iterator)).tolist()
        except StopIteration:
            return fetches, found
        time.sleep(pause_s)


@pytest.mark.parametrize("workers", [0, 1])
def test_waiting_is_told_from_computing(workers: int) -> None:
    waits, found = fetched(DataLoader(Samples(computed=False), batch_size=2, num_workers=workers))
    assert found == list(range(24))
    assert waits.share is not None
    assert waits.share < 0.5
    computes, _ = fetched(DataLoader(Samples(computed=True), batch_size=2, num_workers=workers))
    assert computes.share is not None
    assert computes.share > 0.5


def test_workers_that_keep_up_tell_nothing() -> None:
    """They are idle for want of room in their queue."""
    keeps_up, found = fetched(DataLoader(Samples(computed=True), batch_size=1, num_workers=1), pause_s=0.05)
    assert found == list(range(24))
    assert keeps_up.share is None


def test_the_first_fetch_of_a_pass_counts_for_nothing() -> None:
    loader = DataLoader(Samples(computed=True), batch_size=24)
    assert fetched(loader)[0].share is None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_system_that_does_not_tell(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_cpu, "_PROC", "/nowhere")
    fetches, found = fetched(DataLoader(Samples(computed=False), batch_size=2, num_workers=workers))
    assert found == list(range(24))
    if workers:
        assert fetches.share is None  # what another process takes is not known
    else:
        assert fetches.share is not None
        assert fetches.share < 0.5
