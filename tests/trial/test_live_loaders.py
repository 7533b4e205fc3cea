"""What the loop gets while batches are held, and which of its loaders is treated: loops of several loaders, batches
that it writes into, pops from and moves."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numbered_batches import cycled, first_of, hold, number_loader
from torch.utils.data import DataLoader, TensorDataset

from perfdoctor.trial.live_loop import NUM_BATCHES, LiveLoop
from perfdoctor.trial.loader_replay import LoaderReplay

Pair = namedtuple("Pair", "x y")


@pytest.fixture
def replay() -> Iterator[LoaderReplay]:
    found = LoaderReplay(lambda: None)
    found.install()
    yield found
    found.remove()


@pytest.mark.parametrize("replayed", [True, False])
def test_zipped_loaders_each_give_their_own_batches(live: LiveLoop, replayed: bool) -> None:
    both = iter(zip(number_loader(0), number_loader(1000), strict=True))
    for _ in range(10):
        next(both)
    live.held = True
    for _ in range(2):
        live.restart(replayed=replayed)
        assert [tuple(map(first_of, next(both))) for _ in range(4)] == [(2 * i, 1000 + 2 * i) for i in range(4)]


def test_zipped_loaders_made_anew_in_each_epoch_are_told_apart(live: LiveLoop) -> None:
    seen: list[tuple[int, int]] = []
    for epoch in range(8):
        if epoch == 4:
            hold(live)
        for number, (a, b) in enumerate(zip(number_loader(0), number_loader(1000), strict=True)):
            seen.append((first_of(a), first_of(b)))
            if number == 2:
                break
    assert seen[:3] == [(0, 1000), (2, 1002), (4, 1004)]
    assert seen[12:] == [(2 * (i % 3), 1000 + 2 * (i % 3)) for i in [0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 2, 0]]


def test_zipped_loaders_in_a_trial_of_suspects(replay: LoaderReplay) -> None:
    seen = []
    for _ in range(3):  # what an iterator's memory was, the next one's may be
        both = iter(zip(number_loader(0), number_loader(1000), strict=True))
        seen += [tuple(map(first_of, next(both))) for _ in range(6)]
    assert all(b == 1000 + a for a, b in seen)
    assert [a for a, _ in seen] == [2 * (i % 4) for i in range(18)]  # round and round, also from epoch to epoch


def test_zipped_generators_over_loaders_made_anew_are_told_apart(live: LiveLoop) -> None:
    both = zip(cycled(lambda: number_loader(0)), cycled(lambda: number_loader(1000)), strict=True)
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
    loaders = number_loader(0, one), number_loader(1000, other)
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
    batches = iter(number_loader())
    for _ in range(10):
        write(next(batches))
    hold(live)
    for turn in range(20):
        x = next(batches)
        assert first_of(x) == 2 * (turn % NUM_BATCHES)
        write(x)


@pytest.mark.parametrize("write", WRITES)
def test_batches_written_into_in_a_trial_of_suspects(
    replay: LoaderReplay, write: Callable[[torch.Tensor], None]
) -> None:
    batches = iter(number_loader())
    for turn in range(12):
        x = next(batches)
        assert first_of(x) == 2 * (turn % 4)
        write(x)


def test_batches_written_into_now_and_then_come_again_as_they_were(live: LiveLoop) -> None:
    batches = iter(number_loader())
    for _ in range(10):
        next(batches)
    hold(live)
    for turn in range(40):
        x = next(batches)
        assert first_of(x) == 2 * (turn % NUM_BATCHES)
        if turn % 3 == 0:
            x.add_(7)


def test_only_what_is_written_into_is_copied(live: LiveLoop) -> None:
    batches = iter(DataLoader(TensorDataset(torch.zeros(400, 2), torch.zeros(400, 2)), batch_size=2))
    given = []
    for _ in range(10):
        x, y = next(batches)
        given.append((x.data_ptr(), y.data_ptr()))
        x.add_(1)
    hold(live)
    kept = [next(batches) for _ in range(NUM_BATCHES)]
    assert [y.data_ptr() for _, y in kept] == [y for _, y in given[:NUM_BATCHES]]
    assert all(x.data_ptr() != was for (x, _), (was, _) in zip(kept, given, strict=False))


def test_the_gradient_of_a_batch_does_not_grow_from_replay_to_replay(live: LiveLoop) -> None:
    batches = iter(number_loader())
    for turn in range(30):  # as an attack on the model has it
        if turn == 10:
            hold(live)
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
    batches = iter(number_loader(collate_fn=lambda rows: make(torch.stack(rows))))
    for turn in range(30):
        if turn == 10:
            hold(live)
        x = use(next(batches))
        expected = 2 * (turn if turn < 10 else (turn - 10) % NUM_BATCHES)
        assert x.tolist() == [[expected] * 2, [expected + 1] * 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_type_in_a_trial_of_suspects(replay: LoaderReplay, kind: str) -> None:
    make, use = KINDS[kind]
    batches = iter(number_loader(collate_fn=lambda rows: make(torch.stack(rows))))
    for turn in range(12):
        assert use(next(batches))[0, 0] == 2 * (turn % 4)


def test_one_tensor_under_two_names_stays_one(live: LiveLoop) -> None:
    batches = iter(number_loader(collate_fn=lambda rows: dict.fromkeys(("x", "y"), torch.stack(rows))))
    for _ in range(10):
        next(batches)["x"].add_(1)
    hold(live)
    for _ in range(10):
        batch = next(batches)
        assert batch["x"] is batch["y"]


def test_a_large_object_in_a_batch_is_handed_out_as_it_is(live: LiveLoop) -> None:
    vocabulary = {str(number): number for number in range(100_000)}
    batches = iter(number_loader(collate_fn=lambda rows: {"x": torch.stack(rows), "vocabulary": vocabulary}))
    for turn in range(12):
        if turn == 10:
            hold(live)
        assert next(batches)["vocabulary"] is vocabulary


def test_kept_values_are_those_of_the_loader_for_arrays_of_numbers(live: LiveLoop) -> None:
    batches = iter(number_loader(collate_fn=lambda rows: np.stack([row.numpy() for row in rows])))
    for _ in range(10):
        next(batches)[:] = -1
    hold(live)
    for turn in range(20):
        batch = next(batches)
        assert batch[0, 0] == 2 * (turn % NUM_BATCHES)
        batch[:] = -1
