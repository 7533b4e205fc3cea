"""What the loop gets while batches are held where a loader is made anew in every epoch, and left before its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from numbered_batches import cycled, first_of, hold, number_loader

from perfdoctor.trial.live_loop import NUM_BATCHES, LiveLoop
from perfdoctor.trial.loader_places import LoaderUse


def _treat(loader: Any) -> None:
    """Its batches are others from its next iterator on."""
    loader.dataset.first = 1000


def test_a_loader_made_anew_gives_the_treated_one_s_batches(live: LiveLoop) -> None:
    loop = cycled(number_loader)
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
        for number, _ in enumerate(number_loader()):
            if number == 2:
                break
        assert len(live._places.places) == 1, epoch


def test_an_epoch_that_ends_while_losses_are_kept_changes_no_batch_and_no_number_drawn(live: LiveLoop) -> None:
    loop = cycled(lambda: number_loader(shuffle=True))
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
            for number, x in enumerate(number_loader()):
                if number == 3:
                    break
                (x * weight).sum().backward()
                yield first_of(x)

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
    loop = cycled(number_loader)
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
            hold(live)
        a, b = next(iter(number_loader(0))), next(iter(number_loader(1000)))
        seen.append((first_of(a), first_of(b)))
    assert set(seen) == {(0, 1000)}


def test_a_loader_first_asked_while_held_replays_its_own(live: LiveLoop) -> None:
    usual, late = iter(number_loader()), iter(number_loader(1000))
    for _ in range(10):
        next(usual)
    live.held = True
    for _ in range(2):
        live.restart(replayed=True)
        assert [first_of(next(late)) for _ in range(12)] == [1000 + 2 * (i % NUM_BATCHES) for i in range(12)]
        assert first_of(next(usual)) == 0


@pytest.mark.parametrize("made_anew", [True, False])
def test_how_long_an_epoch_lasts_and_whether_its_loader_is_another(live: LiveLoop, made_anew: bool) -> None:
    loader = number_loader()
    weight = torch.nn.Parameter(torch.ones(2))
    generator, critic = torch.optim.SGD([weight], 0.1), torch.optim.SGD([weight], 0.1)
    for _ in range(2):
        assert live.loader_use().epoch == 0  # not known yet
        for number, x in enumerate(number_loader() if made_anew else loader):
            if number == 2:
                break  # of three batches
            (x * weight).sum().backward()
            generator.step()
            critic.step()  # no step of its own
    use = live.loader_use()
    assert (use.epoch, use.made_anew) == (2, made_anew)
    assert use.loader is live.loop().loader


def test_of_no_loader_nothing_is_known(live: LiveLoop) -> None:
    assert live.loader_use() == LoaderUse()
