"""Batches that are held longer: they stay as they were, or are refused where addresses are fixed.

Copies run at once on the emulated device, so a slot that was filled too early shows as wrong values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prefetch_loops import Batch, batches, staging_threads, value

from perfdoctor.errors import StaleBatchError
from perfdoctor.treat.prefetch import DevicePrefetcher


@pytest.mark.usefixtures("emulated")
@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 40), st.sampled_from(["tensor", "view", "grad", "storage"]))),
    st.integers(1, 3),
)
def test_a_batch_stays_as_it_was_for_as_long_as_it_is_kept(plan: list[tuple[int, int, str]], depth: int) -> None:
    """Each batch is kept for some steps in one of the ways to hold memory; shapes differ."""
    loader = [torch.full((size, 2), float(i)) for i, (_, size, _) in enumerate(plan)]
    kept: list[tuple[int, float, Any]] = []
    for i, batch in enumerate(DevicePrefetcher(loader, "cuda", depth)):
        keep_for, size, how = plan[i]
        assert batch.shape == (size, 2)
        kept.append((i + keep_for, float(i), _held(batch, how)))
        for until, number, read in kept:
            if i <= until:
                assert read() == number
        kept = [entry for entry in kept if entry[0] > i]


def _held(batch: torch.Tensor, how: str) -> Any:
    if how == "view":
        row = batch[0]
        return lambda: value(row)
    if how == "grad":
        weight = torch.ones(2, device="cuda", requires_grad=True)
        loss = (batch[0] * weight).sum()
        # The batch lives on in what autograd saved, nowhere else.
        return lambda: float(torch.autograd.grad(loss, weight, retain_graph=True)[0][0])
    if how == "storage":
        storage = batch.untyped_storage()
        return lambda: value(torch.empty(0).set_(storage)[:1])
    return lambda: value(batch)


@pytest.mark.usefixtures("emulated")
def test_all_batches_may_be_kept() -> None:
    for epoch in range(2):
        kept = list(DevicePrefetcher(batches(11), "cuda"))
        assert [value(batch["x"]) for batch in kept] == [float(i) for i in range(11)], epoch


@pytest.mark.usefixtures("emulated")
def test_one_kept_tensor_keeps_its_own_memory_only() -> None:
    loader = [(torch.full((4,), float(i)), torch.full((4,), -float(i))) for i in range(20)]
    labels, images = [], set()
    for image, label in DevicePrefetcher(loader, "cuda"):
        images.add(image.data_ptr())
        labels.append(label)
    assert len(images) == 4
    assert [value(label) for label in labels] == [-float(i) for i in range(20)]


@pytest.mark.usefixtures("emulated")
def test_what_the_user_sets_on_a_tensor_stays_with_it() -> None:
    for step, (x,) in enumerate(DevicePrefetcher([(torch.ones(3),)] * 9, "cuda")):
        assert not x.requires_grad, step
        assert value(x) == 1.0
        x.requires_grad_()
        (x * 3).sum().backward()
        x.data.add_(5)


@pytest.mark.usefixtures("emulated")
def test_a_fixed_address_that_is_still_held_is_an_error_at_the_step_that_needs_it() -> None:
    depth, seen = 2, 0
    prefetcher = DevicePrefetcher(batches(20), "cuda", depth, stable_addresses=True)
    kept: list[torch.Tensor] = []

    def run() -> None:
        nonlocal seen
        for i, batch in enumerate(prefetcher):
            if i == 3:
                kept.append(batch["x"][2:4])
            seen = i

    with pytest.raises(StaleBatchError, match="still referenced"):
        run()
    assert seen == 3 + depth + 1  # its slot is for the batch after that
    assert value(kept[0]) == 3.0
    assert not staging_threads()


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_batch_at_a_fixed_address_may_be_kept_for_depth_steps(depth: int) -> None:
    window: list[Batch] = []
    for i, batch in enumerate(DevicePrefetcher(batches(20), "cuda", depth, stable_addresses=True)):
        window = [*window[-depth:], batch]
        assert [value(old["x"]) for old in window] == [float(n) for n in range(max(0, i - depth), i + 1)]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("count", range(1, 10))
def test_the_last_batch_of_an_epoch_may_be_held_while_the_next_begins(count: int) -> None:
    prefetcher = DevicePrefetcher(batches(count), "cuda", stable_addresses=True)
    addresses = set()
    for epoch in range(12):
        for i, batch in enumerate(prefetcher):
            assert value(batch["x"]) == i
            addresses.add(batch["x"].data_ptr())
            if epoch % 3 == 0 and i == 2:
                break
    assert len(addresses) == 4


@pytest.mark.usefixtures("emulated")
def test_each_shape_has_fixed_addresses_of_its_own() -> None:
    sizes = [8, 8, 8, 8, 24, 8, 8, 8, 8, 24, 8, 8]
    prefetcher = DevicePrefetcher([torch.ones(n) for n in sizes], "cuda", 2, stable_addresses=True)
    passes = [[(batch.numel(), batch.data_ptr()) for batch in prefetcher] for _ in range(2)]
    assert passes[0] == passes[1]
    assert len({address for size, address in passes[0] if size == 8}) == 4
