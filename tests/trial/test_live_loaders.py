"""What the loop gets while batches are held, and which of its loaders is treated: loops of several loaders, batches
that it writes into, pops from and moves, loaders that are made anew in every epoch."""

from __future__ import annotations

import dataclasses
import time
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from perfdoctor.trial.live_loop import NUM_BATCHES, LiveLoop
from perfdoctor.trial.loader_replay import LoaderReplay

Pair = namedtuple("Pair", "x y")


@pytest.fixture
def live() -> Iterator[LiveLoop]:
    loop = LiveLoop()
    loop.install()
    yield loop
    loop.remove()


@pytest.fixture
def replay() -> Iterator[LoaderReplay]:
    found = LoaderReplay(lambda: None)
    found.install()
    yield found
    found.remove()


class Numbers(Dataset[torch.Tensor]):
    """Rows that know their number; each takes `pause_s`."""

    def __init__(self, first: int = 0, pause_s: float = 0.0, size: int = 400) -> None:
        self.first, self.pause_s, self.size = first, pause_s, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.pause_s)
        return torch.full((2,), float(self.first + index))


def _loader(first: int = 0, pause_s: float = 0.0, **settings: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(first, pause_s), batch_size=2, **settings)


def _first(batch: torch.Tensor) -> int:
    return int(batch[0, 0])


def _held(live: LiveLoop) -> None:
    live.held = True
    live.restart(replayed=True)


@pytest.mark.parametrize("replayed", [True, False])
def test_zipped_loaders_each_give_their_own_batches(live: LiveLoop, replayed: bool) -> None:
    both = iter(zip(_loader(0), _loader(1000), strict=True))
    for _ in range(10):
        next(both)
    live.held = True
    for _ in range(2):
        live.restart(replayed=replayed)
        assert [tuple(map(_first, next(both))) for _ in range(4)] == [(2 * i, 1000 + 2 * i) for i in range(4)]


def test_zipped_loaders_made_anew_in_each_epoch_are_told_apart(live: LiveLoop) -> None:
    seen: list[tuple[int, int]] = []
    for epoch in range(8):
        if epoch == 4:
            _held(live)
        for number, (a, b) in enumerate(zip(_loader(0), _loader(1000), strict=True)):
            seen.append((_first(a), _first(b)))
            if number == 2:
                break
    assert seen[:3] == [(0, 1000), (2, 1002), (4, 1004)]
    assert seen[12:] == [(2 * (i % 3), 1000 + 2 * (i % 3)) for i in [0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 2, 0]]


def test_zipped_loaders_in_a_trial_of_suspects(replay: LoaderReplay) -> None:
    seen = []
    for _ in range(3):  # what an iterator's memory was, the next one's may be
        both = iter(zip(_loader(0), _loader(1000), strict=True))
        seen += [tuple(map(_first, next(both))) for _ in range(6)]
    assert all(b == 1000 + a for a, b in seen)
    assert [a for a, _ in seen] == [2 * (i % 4) for i in range(18)]  # round and round, also from epoch to epoch


def _cycled(make: Callable[[], Any]) -> Iterator[int]:
    """A loop that makes a loader for each epoch and leaves it after three steps."""
    weight = torch.ones(2, requires_grad=True)
    while True:
        for number, x in enumerate(make()):
            (x * weight).sum().backward()
            yield _first(x)
            if number == 2:
                break


def test_zipped_generators_over_loaders_made_anew_are_told_apart(live: LiveLoop) -> None:
    both = zip(_cycled(lambda: _loader(0)), _cycled(lambda: _loader(1000)), strict=True)
    for _ in range(10):
        assert int.__sub__(*next(both)) == -1000
    for replayed in (True, False):
        live.held = True
        live.restart(replayed=replayed)
        for _ in range(10):
            assert int.__sub__(*next(both)) == -1000


@pytest.mark.parametrize(("one", "other", "costliest"), [(0.0, 0.003, 1), (0.003, 0.0, 0), (0.003, 0.003, 0)])
def test_of_several_loaders_the_costliest_is_the_loop_s(
    live: LiveLoop, one: float, other: float, costliest: int
) -> None:
    loaders = _loader(0, one), _loader(1000, other)
    both = iter(zip(*loaders, strict=True))
    for _ in range(10):
        next(both)
    assert live.loop().loader is loaders[costliest]


def _scaled(x: torch.Tensor) -> None:
    x.div_(2).add_(1)


def _through_numpy(x: torch.Tensor) -> None:
    x.numpy()[:] += 1


def _through_data(x: torch.Tensor) -> None:
    x.data.mul_(3)


def _in_part(x: torch.Tensor) -> None:
    x[0] = -1.0


WRITES = [_scaled, _through_numpy, _through_data, _in_part]


@pytest.mark.parametrize("write", WRITES)
def test_batches_written_into_come_again_as_they_were(live: LiveLoop, write: Callable[[torch.Tensor], None]) -> None:
    batches = iter(_loader())
    for _ in range(10):
        write(next(batches))
    _held(live)
    for turn in range(20):
        x = next(batches)
        assert _first(x) == 2 * (turn % NUM_BATCHES)
        write(x)


@pytest.mark.parametrize("write", WRITES)
def test_batches_written_into_in_a_trial_of_suspects(
    replay: LoaderReplay, write: Callable[[torch.Tensor], None]
) -> None:
    batches = iter(_loader())
    for turn in range(12):
        x = next(batches)
        assert _first(x) == 2 * (turn % 4)
        write(x)


def test_batches_written_into_now_and_then_come_again_as_they_were(live: LiveLoop) -> None:
    batches = iter(_loader())
    for _ in range(10):
        next(batches)
    _held(live)
    for turn in range(40):
        x = next(batches)
        assert _first(x) == 2 * (turn % NUM_BATCHES)
        if turn % 3 == 0:
            x.add_(7)


def test_only_what_is_written_into_is_copied(live: LiveLoop) -> None:
    batches = iter(DataLoader(TensorDataset(torch.zeros(400, 2), torch.zeros(400, 2)), batch_size=2))
    given = []
    for _ in range(10):
        x, y = next(batches)
        given.append((x.data_ptr(), y.data_ptr()))
        x.add_(1)
    _held(live)
    kept = [next(batches) for _ in range(NUM_BATCHES)]
    assert [y.data_ptr() for _, y in kept] == [y for _, y in given[:NUM_BATCHES]]
    assert all(x.data_ptr() != was for (x, _), (was, _) in zip(kept, given, strict=False))


def test_the_gradient_of_a_batch_does_not_grow_from_replay_to_replay(live: LiveLoop) -> None:
    batches = iter(_loader())
    for turn in range(30):  # as an attack on the model has it
        if turn == 10:
            _held(live)
        x = next(batches).requires_grad_()
        x.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


class Moved:
    """A batch whose `.to` changes it, as those of graphs do."""

    def __init__(self, x: torch.Tensor) -> None:
        self.held = {"x": x, "y": x + 0.5}

    def to(self, dtype: torch.dtype) -> None:
        for name in self.held:
            self.held[name] = self.held[name].to(dtype)


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    words: list[str]


class Encoding(UserDict[str, Any]):
    """As that of transformers: a class of its own state."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.sequences = 1

    def __getstate__(self) -> dict[str, Any]:
        return {"given": self.data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.data = state["given"]


def _pop(batch: Any) -> torch.Tensor:
    assert isinstance(batch.pop("names"), list)
    return batch.pop("x")


def _pop_encoding(batch: Any) -> torch.Tensor:
    assert batch.sequences == 1
    return _pop(batch)


def _move(batch: Moved) -> torch.Tensor:
    assert batch.held["x"].dtype == torch.float32
    batch.to(torch.float64)
    return batch.held["x"]


def _take_from(batch: Sample) -> torch.Tensor:
    assert batch.words.pop() == "b"
    x = batch.x
    batch.x = x.new_zeros(0)
    return x


def _array(batch: Any) -> torch.Tensor:
    x = torch.tensor(batch["x"])
    batch["x"] += 1
    assert batch["lock"] is None or batch.pop("lock").send(None) == 1
    return x


def _one() -> Iterator[int]:
    while True:
        yield 1


KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dict": (lambda x: {"x": x, "names": ["a"]}, _pop),
    "nested": (lambda x: [({"x": x, "names": ["a"]},)], lambda batch: _pop(batch.pop()[0])),
    "UserDict": (lambda x: Encoding({"x": x, "names": ["a"]}), _pop_encoding),
    "moved in place": (Moved, _move),
    "dataclass": (lambda x: Sample(x, ["a", "b"]), _take_from),
    "namedtuple": (lambda x: Pair({"x": x, "names": []}, x), lambda batch: _pop(batch.x)),
    "array": (lambda x: {"x": x.numpy().copy(), "lock": None}, _array),
    "what no copy can be made of": (lambda x: {"x": x.numpy().copy(), "lock": GENERATOR}, _array),
    "several names": (lambda x: {"x": x, "names": [], "y": x}, lambda batch: (_pop(batch), batch.pop("y"))[0]),
}
GENERATOR = _one()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_type_comes_again_whole(live: LiveLoop, kind: str) -> None:
    make, use = KINDS[kind]
    batches = iter(_loader(collate_fn=lambda rows: make(torch.stack(rows))))
    for turn in range(30):
        if turn == 10:
            _held(live)
        x = use(next(batches))
        expected = 2 * (turn if turn < 10 else (turn - 10) % NUM_BATCHES)
        assert x.tolist() == [[expected] * 2, [expected + 1] * 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_type_in_a_trial_of_suspects(replay: LoaderReplay, kind: str) -> None:
    make, use = KINDS[kind]
    batches = iter(_loader(collate_fn=lambda rows: make(torch.stack(rows))))
    for turn in range(12):
        assert use(next(batches))[0, 0] == 2 * (turn % 4)


def test_one_tensor_under_two_names_stays_one(live: LiveLoop) -> None:
    batches = iter(_loader(collate_fn=lambda rows: dict.fromkeys(("x", "y"), torch.stack(rows))))
    for _ in range(10):
        next(batches)["x"].add_(1)
    _held(live)
    for _ in range(10):
        batch = next(batches)
        assert batch["x"] is batch["y"]


def test_a_large_object_in_a_batch_is_handed_out_as_it_is(live: LiveLoop) -> None:
    vocabulary = {str(number): number for number in range(100_000)}
    batches = iter(_loader(collate_fn=lambda rows: {"x": torch.stack(rows), "vocabulary": vocabulary}))
    for turn in range(12):
        if turn == 10:
            _held(live)
        assert next(batches)["vocabulary"] is vocabulary


def _treat(loader: Any) -> None:
    """Its batches are others from its next iterator on."""
    loader.dataset.first = 1000


def test_a_loader_made_anew_gives_the_treated_one_s_batches(live: LiveLoop) -> None:
    loop = _cycled(_loader)
    assert [next(loop) for _ in range(10)] == [0, 2, 4] * 3 + [0]
    loader = live.loop().loader
    live.held = True
    _treat(loader)
    live.restart(replayed=False)
    live.listening = True  # every run gets the same batches, wherever the loop is in its epoch
    assert [next(loop) for _ in range(7)] == [1000, 1002, 1004, 1006, 1008, 1010, 1012]
    live.listening = False
    live.restart(replayed=False)
    assert [next(loop) for _ in range(7)] == [1000, 1000, 1002, 1004, 1000, 1002, 1004]  # an epoch is left as by hand


def test_a_loader_made_anew_is_known_again_though_its_call_has_been_specialised(live: LiveLoop) -> None:
    """In CPython 3.11 a call then runs as another instruction, from another offset."""
    for epoch in range(40):
        for number, _ in enumerate(_loader()):
            if number == 2:
                break
        assert len(live._places.places) == 1, epoch


def test_an_epoch_that_ends_while_losses_are_kept_changes_no_batch_and_no_number_drawn(live: LiveLoop) -> None:
    loop = _cycled(lambda: _loader(shuffle=True))
    for _ in range(9):
        next(loop)
    live.held = True
    before, seen = torch.get_rng_state(), []
    for _ in range(3):  # the epoch ends before the first of seven batches, then before the second, the third
        torch.set_rng_state(before)
        live.restart(replayed=False)
        live.listening = True
        seen.append([(next(loop), float(torch.rand(()))) for _ in range(7)])
        live.listening = False
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("replayed", [True, False])
def test_a_batch_that_an_epoch_was_left_with_is_not_skipped_while_losses_are_kept(
    live: LiveLoop, replayed: bool
) -> None:
    """Once in an epoch such a loop asks for a batch more than it has steps: where in it a run began would tell."""

    def steps() -> Iterator[int]:
        weight = torch.ones(2, requires_grad=True)
        while True:
            for number, x in enumerate(_loader()):
                if number == 3:
                    break
                (x * weight).sum().backward()
                yield _first(x)

    loop = steps()
    for _ in range(10):
        next(loop)
    live.held = True
    for _ in range(3):
        live.restart(replayed=replayed)
        live.listening = True
        # Kept were the four that each epoch asks for, twice.
        assert [next(loop) for _ in range(8)] == [0, 2, 4, 6, *([0, 2, 4, 6] if replayed else [8, 10, 12, 14])]
        live.listening = False


def test_the_workers_of_a_loader_made_anew_do_not_persist(live: LiveLoop) -> None:
    """Written into the script, the treatment would start them in every epoch."""
    loop = _cycled(_loader)
    for _ in range(9):
        next(loop)
    loader: Any = live.loop().loader
    live.held = True
    vars(loader).update(num_workers=1, prefetch_factor=2, persistent_workers=True)
    live.restart(replayed=False)
    workers = []
    for _ in range(6):
        next(loop)
        workers.append(loader._iterator._workers[0].pid)
    live.restart(replayed=False)
    loader._iterator = None
    assert len(set(workers[:3])) == len(set(workers[3:])) == 1
    assert workers[0] != workers[3]


def test_another_loader_of_the_same_kind_is_no_successor(live: LiveLoop) -> None:
    """Two that are iterated in turn at two places of a line, each made anew whenever it is asked."""
    seen = []
    for turn in range(20):
        if turn == 10:
            _held(live)
        a, b = next(iter(_loader(0))), next(iter(_loader(1000)))
        seen.append((_first(a), _first(b)))
    assert set(seen) == {(0, 1000)}


def test_a_loader_first_asked_while_held_replays_its_own(live: LiveLoop) -> None:
    usual, late = iter(_loader()), iter(_loader(1000))
    for _ in range(10):
        next(usual)
    live.held = True
    for _ in range(2):
        live.restart(replayed=True)
        assert [_first(next(late)) for _ in range(12)] == [1000 + 2 * (i % NUM_BATCHES) for i in range(12)]
        assert _first(next(usual)) == 0


def test_kept_values_are_those_of_the_loader_for_arrays_of_numbers(live: LiveLoop) -> None:
    batches = iter(_loader(collate_fn=lambda rows: np.stack([row.numpy() for row in rows])))
    for _ in range(10):
        next(batches)[:] = -1
    _held(live)
    for turn in range(20):
        batch = next(batches)
        assert batch[0, 0] == 2 * (turn % NUM_BATCHES)
        batch[:] = -1
