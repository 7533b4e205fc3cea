"""DevicePrefetcher on a GPU: slow kernels, other streams, memory, graph capture beside the staging threads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import perfdoctor
from perfdoctor.errors import StaleBatchError
from perfdoctor.treat.prefetch import DevicePrefetcher

pytestmark = pytest.mark.gpu
SLOW_CYCLES = 20_000_000  # about 10 ms
SIZE = 1 << 20  # floats, 4 MB


def loader(count: int, pinned: bool, size: int = SIZE) -> list[dict[str, Any]]:
    made = [{"x": torch.full((size,), float(i)), "n": i} for i in range(count)]
    return [{**batch, "x": batch["x"].pin_memory()} for batch in made] if pinned else made


def check_late(x: torch.Tensor, expected: float) -> torch.Tensor:
    """How many elements differ, read by a kernel that starts long after the host has gone on."""
    torch.cuda._sleep(SLOW_CYCLES)
    return (x != expected).sum()


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("stable", [False, True])
def test_a_slow_consumer_reads_what_belongs_to_its_step(pinned: bool, stable: bool) -> None:
    prefetcher = DevicePrefetcher(loader(12, pinned), "cuda", stable_addresses=stable)
    for _ in range(3):
        wrong = [check_late(batch["x"], float(batch["n"])) for batch in prefetcher]
        assert sum(int(count) for count in wrong) == 0


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("keep_for", [1, 2, 5])
def test_a_batch_that_is_kept_and_used_again_stays_correct_for_a_slow_consumer(pinned: bool, keep_for: int) -> None:
    wrong, window = [], []
    for batch in DevicePrefetcher(loader(20, pinned), "cuda"):
        window.append((batch["n"], batch["x"][1:]))
        if len(window) > keep_for:
            number, view = window.pop(0)
            wrong.append(check_late(view, float(number)))
            del view
    assert sum(int(count) for count in wrong) == 0


@pytest.mark.parametrize("pinned", [False, True])
def test_what_autograd_saved_and_nothing_else_holds(pinned: bool) -> None:
    weight = torch.ones(SIZE, device="cuda", requires_grad=True)
    losses = []
    for batch in DevicePrefetcher(loader(10, pinned), "cuda"):
        losses.append((batch["x"] * weight).sum())
        torch.cuda._sleep(SLOW_CYCLES)
    for number, loss in enumerate(losses):
        (grad,) = torch.autograd.grad(loss, weight)
        assert bool((grad == number).all())


def test_a_consumer_on_a_stream_of_its_own() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wrong = [check_late(batch["x"], float(batch["n"])) for batch in DevicePrefetcher(loader(12, False), "cuda")]
    stream.synchronize()
    assert sum(int(count) for count in wrong) == 0


def test_a_consumer_that_changes_its_stream() -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = []
    for batch in DevicePrefetcher(loader(24, False), "cuda"):
        stream = streams[batch["n"] % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            wrong.append(check_late(batch["x"], float(batch["n"])))
        torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert sum(int(count) for count in wrong) == 0


def test_memory_given_back_at_an_early_end_is_not_written_any_more() -> None:
    for turn in range(20):
        prefetcher = DevicePrefetcher(loader(6, False), "cuda")
        for _ in prefetcher:
            torch.cuda._sleep(SLOW_CYCLES // 4)
            break
        if turn % 2:
            prefetcher.close()
        del prefetcher
        gc.collect()
        mine = [torch.full((SIZE,), -1.0, device="cuda") for _ in range(4)]
        torch.cuda._sleep(SLOW_CYCLES // 4)
        assert all(bool((block == -1).all()) for block in mine)


@pytest.mark.parametrize("pinned", [False, True])
def test_no_sync_and_no_allocation_after_warm_up(pinned: bool) -> None:
    prefetcher = DevicePrefetcher(loader(8, pinned), "cuda")
    for batch in prefetcher:
        del batch
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    with perfdoctor.sync_guard(budget=0):
        for _ in range(3):
            for _batch in prefetcher:
                torch.cuda._sleep(SLOW_CYCLES // 4)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations


def test_reserved_memory_is_flat_over_100_epochs() -> None:
    sizes = [1000, 4000, 2500, 4000, 700]
    batches = [torch.ones(size, 64) for size in sizes]
    prefetcher = DevicePrefetcher(batches, "cuda")
    for _ in range(2):  # warm-up: how many blocks the results take at once depends on how far the host runs ahead
        for batch in prefetcher:
            (batch * 2).sum()
    reserved = torch.cuda.memory_reserved()
    for _ in range(100):
        for batch in prefetcher:
            (batch * 2).sum()
    assert torch.cuda.memory_reserved() == pytest.approx(reserved, rel=0.01)


def test_addresses_come_round_and_a_held_batch_is_refused() -> None:
    prefetcher = DevicePrefetcher(loader(12, False), "cuda", stable_addresses=True)
    addresses = [[batch["x"].data_ptr() for batch in prefetcher] for _ in range(2)]
    assert addresses[0] == addresses[1]
    assert len(set(addresses[0])) == 4
    with pytest.raises(StaleBatchError):
        list(prefetcher)
    assert not [thread for thread in threading.enumerate() if thread.name == "perfdoctor-staging"]


def test_a_graph_captured_while_the_threads_stage_replays_over_the_slots() -> None:
    total = torch.zeros((), device="cuda")
    graphs: dict[int, Any] = {}
    expected = 0.0
    batches = loader(20, False, 16 << 20)  # 64 MB: staging goes on during the capture
    for batch in DevicePrefetcher(batches, "cuda", stable_addresses=True):
        x, address = batch["x"], batch["x"].data_ptr()
        if address not in graphs:
            graphs[address] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[address]):
                total.add_(x.max())
        graphs[address].replay()
        expected += float(batch["n"])
        del x, batch
    assert len(graphs) == 4
    assert total.item() == expected


def test_an_exception_gives_device_and_pinned_memory_back() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield torch.ones(SIZE)
        raise ValueError("damaged")

    gc.collect()
    before = torch.cuda.memory_allocated()
    prefetcher = DevicePrefetcher(broken(), "cuda")
    with pytest.raises(ValueError, match="damaged"):
        list(prefetcher)
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def worker_batches(**options: Any) -> torch.utils.data.DataLoader[Any]:
    data = torch.utils.data.TensorDataset(torch.arange(4096.0).reshape(1024, 4))
    return torch.utils.data.DataLoader(data, batch_size=100, num_workers=2, pin_memory=True, **options)


def check_two_epochs(loader: torch.utils.data.DataLoader[Any]) -> None:
    for _ in range(2):
        got = [x.clone() for (x,) in DevicePrefetcher(loader, "cuda")]
        assert torch.equal(torch.cat(got).cpu(), torch.arange(4096.0).reshape(1024, 4))


def test_spawned_worker_processes_and_a_thread_that_pins() -> None:
    check_two_epochs(worker_batches(multiprocessing_context="spawn", persistent_workers=True))


def test_forked_worker_processes_and_a_thread_that_pins() -> None:
    """In a process of its own.

    A forked worker inherits what waits here for the garbage collector. Pinned or device memory that its collector
    frees aborts it (cudaErrorInitializationError), and pytest keeps the exceptions of earlier tests with their frames.
    """
    code = "import test_prefetch_gpu as test; test.check_two_epochs(test.worker_batches())"
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(perfdoctor.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
