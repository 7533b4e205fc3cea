"""DevicePrefetcher on the emulated device: values, order, state, and who holds what when a slot comes round.

Copies run at once there, so a slot that was filled too early shows as wrong values.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from prefetch_loops import BIG, Batch, batches, staging_threads, value
from torch.utils.data import DataLoader, Dataset, TensorDataset

import perfdoctor
from perfdoctor.errors import UsageError
from perfdoctor.treat.prefetch import DevicePrefetcher


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("size", [8, BIG])
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("stable", [False, True])
def test_every_batch_comes_once_in_order(size: int, depth: int, stable: bool) -> None:
    loader = batches(9, size)
    prefetcher = DevicePrefetcher(loader, "cuda", depth, stable)
    for _ in range(3):
        seen = [(batch["n"], value(batch["x"]), batch["x"].is_cuda) for batch in prefetcher]
        assert seen == [(i, float(i), True) for i in range(9)]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("size", [8, BIG])
def test_no_step_waits_for_the_device(size: int) -> None:
    prefetcher = DevicePrefetcher(batches(9, size), "cuda")
    with perfdoctor.sync_guard(budget=0):
        for _ in range(2):
            for batch in prefetcher:
                batch["x"].mul(2).sum()


@pytest.mark.usefixtures("emulated")
def test_the_ring_has_depth_plus_two_addresses_and_keeps_them_over_epochs() -> None:
    prefetcher = DevicePrefetcher(batches(12), "cuda", depth=3)
    addresses = [[batch["x"].data_ptr() for batch in prefetcher] for _ in range(2)]
    assert len(set(addresses[0])) == 5
    assert set(addresses[1]) == set(addresses[0])


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("stable", [False, True])
def test_shapes_dtypes_and_the_number_of_tensors_may_change(stable: bool) -> None:
    loader: list[Any] = [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(3),
        torch.tensor(True),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(0, 4), 5),
        [torch.randn(3, 4, dtype=torch.complex64).t()],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(4, 1).expand(4, 3),
        torch.randn(10, 10)[::2, ::3],
        torch.randn(3, dtype=torch.complex64).conj(),
        "no tensor at all",
        (),
    ]
    for batch, source in zip(DevicePrefetcher(loader, "cuda", 2, stable), loader, strict=True):
        for mine, theirs in zip(_tensors(batch), _tensors(source), strict=True):
            plain = theirs.to("cuda")
            assert mine.dtype == theirs.dtype
            assert mine.shape == theirs.shape
            assert mine.stride() == plain.stride()
            assert torch.equal(mine.cpu(), theirs)


def _tensors(batch: Any) -> list[torch.Tensor]:
    items = batch if isinstance(batch, (list, tuple)) else [batch]
    return [item for item in items if isinstance(item, torch.Tensor)]


@pytest.mark.usefixtures("emulated")
def test_an_exception_comes_after_the_batches_before_it_and_leaves_nothing() -> None:
    class Broken(Exception):
        pass

    def loader() -> Iterator[torch.Tensor]:
        for i in range(5):
            yield torch.full((BIG,), float(i))
        raise Broken("record 5 is damaged")

    seen = []
    prefetcher = DevicePrefetcher(loader(), "cuda")

    def run() -> None:
        for batch in prefetcher:
            seen.append(value(batch))
            assert staging_threads()

    with pytest.raises(Broken, match="record 5"):
        run()
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert not staging_threads()
    assert not prefetcher._idle  # the ring's memory is given back


@pytest.mark.usefixtures("emulated")
def test_a_loop_that_is_left_leaves_no_thread_and_starts_anew() -> None:
    prefetcher = DevicePrefetcher(batches(9, BIG), "cuda")
    for _ in range(3):
        for i, batch in enumerate(prefetcher):
            assert batch["n"] == i
            if i == 2:
                break
        assert not staging_threads()
        assert value(batch["x"]) == 2.0
    with pytest.raises(ZeroDivisionError):
        fail_in_the_first_step(prefetcher)
    gc.collect()
    assert [batch["n"] for batch in prefetcher] == list(range(9))


def fail_in_the_first_step(prefetcher: DevicePrefetcher) -> None:
    for _ in prefetcher:
        raise ZeroDivisionError


@pytest.mark.usefixtures("emulated")
def test_a_loop_over_an_iterator_goes_on_where_it_was_left() -> None:
    prefetcher = DevicePrefetcher(iter(batches(9)), "cuda")
    seen = []
    for stop in (2, 5, 100):
        for batch in prefetcher:
            seen.append((batch["n"], value(batch["x"])))
            if batch["n"] == stop:
                break
    assert seen == [(i, float(i)) for i in range(9)]
    assert list(prefetcher) == []


@pytest.mark.usefixtures("emulated")
def test_two_loops_at_once_do_not_mix() -> None:
    prefetcher = DevicePrefetcher(batches(6), "cuda")
    pairs = [(value(a["x"]), value(b["x"])) for a, b in zip(prefetcher, prefetcher, strict=True)]
    assert pairs == [(float(i), float(i)) for i in range(6)]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("size", [8, BIG])
def test_a_loader_may_fill_the_same_memory_again(size: int) -> None:
    def loader() -> Iterator[Batch]:
        batch: Batch = {"x": torch.empty(size), "n": -1}
        for i in range(9):
            batch["x"].fill_(i)
            batch["n"] = i
            yield batch

    assert [(batch["n"], value(batch["x"])) for batch in DevicePrefetcher(loader(), "cuda", 3)] == [
        (i, float(i)) for i in range(9)
    ]


@pytest.mark.usefixtures("emulated")
def test_unpinned_batches_are_let_go_once_staged_and_pinned_ones_once_copied() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def loader(pinned: bool) -> Iterator[torch.Tensor]:
        for _ in range(12):
            batch = torch.ones(BIG)
            batch = batch.pin_memory() if pinned else batch
            alive.append(weakref.ref(batch))
            yield batch
            del batch

    for pinned in (False, True):
        alive.clear()
        prefetcher = DevicePrefetcher(loader(pinned), "cuda")
        for i, _ in enumerate(prefetcher):
            # At most what is being fetched ahead and the four slots of the ring.
            assert sum(ref() is not None for ref in alive) <= 4 + 3, (pinned, i)
        prefetcher.close()
        assert not any(ref() is not None for ref in alive), pinned


class _Drawing(Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3) + index

    def __len__(self) -> int:
        return 10


def test_random_numbers_are_drawn_as_without_it() -> None:
    torch.manual_seed(3)
    expected = list(DataLoader(_Drawing(), batch_size=4, shuffle=True))
    after = torch.rand(1)
    with perfdoctor.emulate_cuda():
        torch.manual_seed(3)
        got = [batch.cpu() for batch in DevicePrefetcher(DataLoader(_Drawing(), batch_size=4, shuffle=True), "cuda")]
        assert torch.equal(torch.rand(1), after)
    assert [tuple(batch.shape) for batch in got] == [(4, 3), (4, 3), (2, 3)]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class _Stateful:
    """A loader whose state is the number of the next batch; it writes to the dict that it gave away."""

    def __init__(self) -> None:
        self.place = {"next": 0}
        self.epoch = 0
        self.sampler = object()

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place["next"] < 8:
            self.place["next"] += 1
            yield torch.full((4,), self.place["next"] - 1.0)
        self.place["next"] = 0

    def __len__(self) -> int:
        return 8

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return self.place

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = dict(state)


@pytest.mark.parametrize("emulated", [True, False])
def test_the_state_is_that_of_the_last_batch_handed_out(emulated: bool) -> None:
    def states() -> None:
        loader = _Stateful()
        prefetcher = DevicePrefetcher(loader, "cuda", depth=3)
        assert prefetcher.state_dict() == {"next": 0}
        for i, batch in enumerate(prefetcher):
            assert value(batch) == i
            assert prefetcher.state_dict() == {"next": i + 1}
            if i == 4:
                break
        saved = dict(prefetcher.state_dict())
        again = DevicePrefetcher(_Stateful(), "cuda", depth=3)
        again.load_state_dict(saved)
        assert again.state_dict() == {"next": 5}
        assert [value(batch) for batch in again] == [5.0, 6.0, 7.0]
        assert again.state_dict() == {"next": 0}
        assert [value(batch) for batch in again] == [float(i) for i in range(8)]

    if emulated:
        with perfdoctor.emulate_cuda():
            states()
    else:
        states()


@pytest.mark.usefixtures("emulated")
def test_what_the_loader_has_is_reached_through_it() -> None:
    loader = _Stateful()
    prefetcher = DevicePrefetcher(loader, "cuda")
    prefetcher.set_epoch(4)
    assert loader.epoch == 4
    assert prefetcher.sampler is loader.sampler
    assert len(prefetcher) == 8
    plain = DevicePrefetcher([torch.ones(1)], "cuda")
    assert not hasattr(plain, "state_dict")
    assert not hasattr(plain, "set_epoch")
    with pytest.raises(TypeError):
        len(DevicePrefetcher(iter([1]), "cuda"))


def test_without_cuda_the_very_batches_pass_through() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    loader = batches(4)
    for device in ("cuda", "cuda:1", "cpu", torch.device("cuda")):
        prefetcher = DevicePrefetcher(loader, device, stable_addresses=True)
        assert all(a is b for a, b in zip(prefetcher, loader, strict=True))
        assert len(prefetcher) == 4


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("in_inference_mode", [True, False])
def test_a_ring_serves_training_after_inference(in_inference_mode: bool) -> None:
    prefetcher = DevicePrefetcher(batches(6), "cuda")
    with torch.inference_mode(in_inference_mode):
        assert sum(value(batch["x"]) for batch in prefetcher) == 15.0
    weight = torch.ones(8, device="cuda", requires_grad=True)
    for batch in prefetcher:
        (batch["x"] * weight).sum().backward()
    assert weight.grad is not None
    assert value(weight.grad) == 15.0


@pytest.mark.usefixtures("emulated")
def test_a_data_loader_with_pinned_memory_and_a_last_partial_batch() -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    loader = DataLoader(data, batch_size=4)
    prefetcher = DevicePrefetcher(((x.pin_memory(), y.pin_memory()) for x, y in loader), "cuda")
    with perfdoctor.sync_guard(budget=0):
        got = list(prefetcher)
    assert [x.cpu().tolist() for x, _ in got] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [y.cpu().tolist() for _, y in got] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"depth": 0}, "depth=0"),
        ({"depth": 1.5}, "depth=1.5"),
        ({"depth": True}, "depth=True"),
        ({"depth": 10**12}, "1 to 1000"),
        ({"device": "cpu"}, "expected a CUDA device"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"device": None}, "device=None"),
        ({"device": "cuda:7"}, "1 CUDA device"),
        ({"device": 3}, "1 CUDA device"),
        ({"loader": 5}, "got int"),
        ({"loader": list}, "got type"),
        ({"loader": torch.ones(3)}, "got Tensor"),
    ],
)
def test_bad_input_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        DevicePrefetcher(**{"loader": [1], **arguments})


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("stable", [False, True])
def test_a_host_that_is_far_ahead_waits_for_a_slot_without_a_sync(
    monkeypatch: pytest.MonkeyPatch, stable: bool
) -> None:
    asked: dict[int, int] = {}

    def query(event: Any) -> bool:
        """The copies are over when they were asked for the third time."""
        asked[event.moment] = asked.get(event.moment, 0) + 1
        return event.moment == 0 or asked[event.moment] > 2

    monkeypatch.setattr(torch.cuda.Event, "query", query)
    prefetcher = DevicePrefetcher(batches(15, BIG), "cuda", stable_addresses=stable)
    with perfdoctor.sync_guard(budget=0):
        given = [(batch["n"], batch["x"].clone()) for batch in prefetcher]
    assert [(n, value(x)) for n, x in given] == [(i, float(i)) for i in range(15)]
    assert max(asked.values()) >= 3
