"""Treatments of one DataLoader taken back in any order, and what torch's generator gives meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from switch_loops import CPU
from torch.utils.data import DataLoader, TensorDataset

import perfdoctor
from perfdoctor.treat.loader_layers import Layer, layered
from perfdoctor.treat.switches import treatment
from perfdoctor.treat.treatment import Loop

NAMES = ("dataloader_workers", "pin_memory", "persistent_workers", "prefetch")


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    with perfdoctor.emulate_cuda():
        yield torch.device("cuda", 0)


def loader_of(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, **options)


def held(loader: Any) -> dict[str, Any]:
    return {"type": type(loader), **vars(loader)}


def values(loader: Any) -> list[float]:
    return [value for (batch,) in loader for value in batch.tolist()]


@pytest.mark.parametrize("on", [*itertools.permutations(NAMES, 2), NAMES, NAMES[::-1]], ids="-".join)
def test_taken_back_in_any_order(cuda: torch.device, on: Sequence[str]) -> None:
    loader = loader_of()
    loop = Loop(device=cuda, loader=loader)
    before = held(loader)
    for off in itertools.permutations(range(len(on))):
        opened: list[AbstractContextManager[Loop]] = []
        for name in on:
            opened.append(treatment(name).applied(loop))
            opened[-1].__enter__()
        for number in off:
            opened[number].__exit__(None, None, None)
            assert (next(iter(loader))[0].is_cuda, len(loader)) == (
                "prefetch" in {on[other] for other in off[off.index(number) + 1 :]},
                4,
            )
        assert held(loader) == before
        assert values(loader) == list(range(8))


def test_settings_of_what_is_still_on_stay() -> None:
    loader: Any = loader_of()
    first = layered(loader, Layer(name="a", settings={"num_workers": 1, "prefetch_factor": 2}))
    second = layered(loader, Layer(name="b", settings={"timeout": 5.0, "num_workers": 2}))
    first.__enter__()
    second.__enter__()
    assert (loader.num_workers, loader.timeout) == (2, 5.0)
    first.__exit__(None, None, None)
    assert (loader.num_workers, loader.timeout, loader.prefetch_factor) == (2, 5.0, None)
    second.__exit__(None, None, None)
    assert (loader.num_workers, loader.timeout) == (0, 0)


@pytest.mark.parametrize("own", [{}, {"num_workers": 1}], ids=["in the process", "a worker"])
@pytest.mark.parametrize("on", [["persist"], ["persist", "other"], ["other", "persist"]], ids="-".join)
def test_torchs_generator_goes_on_as_it_would_have(own: dict[str, Any], on: list[str]) -> None:
    settings: dict[str, dict[str, Any]] = {
        "persist": {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 2},
        "other": {"timeout": 60.0 if own or on[0] == "persist" else 0},
    }

    def epochs(names: list[str]) -> list[Any]:
        torch.manual_seed(7)
        loader = loader_of(shuffle=True, **own)
        opened = [layered(loader, Layer(name=name, settings=settings[name])) for name in names]
        for each in opened:
            each.__enter__()
        found = [(values(loader), torch.rand(1).item()) for _ in range(3)]
        for each in reversed(opened):
            each.__exit__(None, None, None)
        return found

    assert epochs(on) == epochs([])


def test_workers_that_persist_already_draw_nothing_more() -> None:
    def epochs(is_treated: bool) -> list[Any]:
        torch.manual_seed(7)
        loader = loader_of(shuffle=True, num_workers=1, persistent_workers=True)
        if not is_treated:
            return [(values(loader), torch.rand(1).item()) for _ in range(3)]
        with layered(loader, Layer(name="other", settings={"timeout": 60.0})):
            return [(values(loader), torch.rand(1).item()) for _ in range(3)]

    assert epochs(True) == epochs(False)


@pytest.mark.parametrize("own", [False, True], ids=["torch's generator", "one of its own"])
@pytest.mark.parametrize("settings", [{"timeout": 60.0}, {"num_workers": 2}], ids=["timeout", "more workers"])
def test_workers_that_persist_and_have_begun_are_treated_in_the_same_order(settings: dict[str, Any], own: bool) -> None:
    """Their loader draws no seed for them any more; the treated one starts its own."""

    def epochs(is_treated: bool) -> list[Any]:
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(3) if own else None
        loader = loader_of(shuffle=True, num_workers=1, persistent_workers=True, generator=generator)
        found = [values(loader)]
        if is_treated:
            with layered(loader, Layer(name="other", settings=settings)):
                found += [values(loader), values(loader)]
            assert loader.generator is generator
        else:
            found += [values(loader), values(loader)]
        return [*found, values(loader), torch.rand(1).item()]

    assert epochs(True) == epochs(False)


def test_what_is_on_already_is_refused(cuda: torch.device) -> None:
    model = torch.nn.Linear(2, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = Loop(device=cuda, model=model, optimizers=(optimizer,), loader=loader_of())
    for name in ("prefetch", "log_every_n", "set_to_none", "our_clip", "bf16_autocast", "pin_memory", "gc_frozen"):
        one = treatment(name)
        assert one.refuses(loop) is None
        with one.applied(loop) as treated:
            reason = one.refuses(treated)
            assert reason, name
            assert "already" in reason
        assert one.refuses(loop) is None
    assert treatment("log_every_n").refuses(Loop(device=CPU)) is not None
