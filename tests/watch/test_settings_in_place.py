"""What a session notes of the loop's own settings, so that no report advises them."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import perfdoctor
from perfdoctor.emulate import emulate_cuda
from perfdoctor.watch.batches import BatchWaits
from perfdoctor.watch.surroundings import describe_settings


def loader(**settings: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, **settings)


def codes(given: Any = None, prefetched: bool = False) -> list[str]:
    return [note.code for note in describe_settings(given, prefetched)]


def test_a_plain_loop_has_nothing() -> None:
    assert codes() == []
    assert codes(loader()) == []


def test_workers_that_persist_by_the_loader_and_by_its_iterator() -> None:
    kept = loader(num_workers=1, persistent_workers=True)
    assert codes(kept) == ["has-persistent_workers"]
    iterator = iter(kept)
    assert codes(iterator) == ["has-persistent_workers"]
    del iterator, kept
    assert codes(loader(num_workers=1)) == []


def test_a_collector_that_is_held_off() -> None:
    gc.collect()
    gc.freeze()
    try:
        assert codes() == ["has-gc_frozen"]
    finally:
        gc.unfreeze()
    gc.disable()
    try:
        assert codes() == ["has-gc_frozen"]
    finally:
        gc.enable()


_AS_PYTHON_312 = """
import gc
gc.freeze()  # before torch: the interpreter's own objects, of which 3.12 freezes 375
import torch
from perfdoctor.treat.switches import treatment
from perfdoctor.treat.treatment import Loop
from perfdoctor.watch.surroundings import describe_settings
print([note.code for note in describe_settings(None, False)])
loop = Loop(device=torch.device("cpu"))
with treatment("gc_frozen").applied(loop):
    print(len(gc.get_objects()) < 1000)
"""


def test_what_the_interpreter_froze_at_its_start_is_not_the_loops_doing() -> None:
    command = [sys.executable, "-c", _AS_PYTHON_312]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert out.split("\n") == ["[]", "True", ""]


def test_tf32_is_known_where_cuda_is_used() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert codes() == ([] if not torch.cuda.is_initialized() else ["has-tf32"])
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("patched", [True, False])
def test_batches_asked_for_by_a_prefetcher(patched: bool) -> None:
    """A script's loader under a prefetcher, and a session round one."""
    waits = BatchWaits([], lambda samples, ns: None)
    with emulate_cuda():
        if patched:
            waits.patch_loaders()
        try:
            batches = iter(perfdoctor.DevicePrefetcher(loader(), "cuda"))
            values = [batch[0].tolist() for batch in (batches if patched else _asked(waits, batches))]
        finally:
            waits.remove()
    assert values == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert waits.prefetched


def _asked(waits: BatchWaits, batches: Any) -> Any:
    while True:
        try:
            yield waits.next_of(batches)
        except StopIteration:
            return


def test_other_loops_are_not_taken_for_prefetched() -> None:
    waits = BatchWaits([], lambda samples, ns: None)
    waits.patch_loaders()
    try:
        assert len(list(loader())) == len(list(_asked(waits, iter(loader())))) == 4
        assert len(list(_asked(waits, (batch for batch in loader())))) == 4
    finally:
        waits.remove()
    assert not waits.prefetched


@pytest.mark.parametrize("around", [True, False])
def test_a_session_rules_prefetching_out_where_the_loop_prefetches(around: bool) -> None:
    with emulate_cuda():
        device_weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
        optimizer = torch.optim.SGD([device_weight], lr=0.1)
        with perfdoctor.watch(warmup=1, active=3) as session:
            for _ in range(4):
                if around:
                    batches = session.batches(perfdoctor.DevicePrefetcher(loader(), "cuda"))
                else:
                    batches = perfdoctor.DevicePrefetcher(session.batches(loader()), "cuda")
                for (x,) in batches:
                    optimizer.zero_grad()
                    (device_weight * x).sum().backward()
                    optimizer.step()
        diagnosis = session.diagnosis()
    assert "prefetch" in diagnosis.ruled_out
