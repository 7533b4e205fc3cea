"""Switches as treatments: applied, they do what they say; undone, everything is as before; refused with a reason."""

from __future__ import annotations

import copy
import dataclasses
import gc
import multiprocessing.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from switch_loops import LIGHT, NAMES, OPTIMIZERS, configuration, small_loop, train
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_by_name
from torch.utils.data import DataLoader, TensorDataset

import perfdoctor
from perfdoctor.errors import UsageError
from perfdoctor.treat.cures import CURES, OF_THE_LOADER, treatments_for
from perfdoctor.treat.switches import TREATMENTS, treated, treatment
from perfdoctor.treat.switches_loader import LOADER
from perfdoctor.treat.treatment import Loop


@pytest.fixture(autouse=True)
def _unfrozen_gc() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_undone_everything_is_as_before(name: str, kind: str) -> None:
    loop = small_loop(kind)
    train(loop, 2)
    before = configuration(loop)
    with treatment(name).applied(loop):
        pass
    assert configuration(loop) == before


@pytest.mark.parametrize("name", [name for name in LIGHT if name not in ("prefetch", "pin_memory")])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_undone_after_training_inside_and_after_an_exception(name: str, kind: str) -> None:
    loop, twin = small_loop(kind), small_loop(kind)
    train(loop, 2), train(twin, 2)
    before = configuration(loop)
    with suppress(KeyboardInterrupt), treatment(name).applied(loop) as inside:
        train(inside, 2)
        raise KeyboardInterrupt
    after = configuration(loop)
    assert after == before
    train(twin, 2)
    assert [group["lr"] for group in loop.optimizers[0].param_groups] == [0.05 if kind == "sgd" else 0.01]
    assert all(torch.isfinite(p).all() for p in loop.model.parameters())  # type: ignore[union-attr]
    assert train(loop, 1) != []


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_losses_stay_within_what_is_claimed(name: str, kind: str) -> None:
    each = treatment(name)
    plain, changed = small_loop(kind), small_loop(kind)
    torch.manual_seed(5)
    wanted = train(plain, 6)
    torch.manual_seed(5)
    if name == "prefetch":  # without CUDA the batches pass through
        pytest.skip("the prefetcher needs a CUDA device; test_switches_gpu has it")
    if name == "pin_memory":
        pytest.skip("pinning needs a CUDA device; test_switches_gpu has it")
    with each.applied(changed) as inside:
        found = train(inside, 6)
    if name == "log_every_n":
        # Values that are read are old by design: the first is held for ten passes. The parameters are the claim.
        assert found == [wanted[0]] * 6
        for mine, theirs in zip(changed.model.parameters(), plain.model.parameters(), strict=True):  # type: ignore[union-attr]
            assert torch.equal(mine, theirs)
    elif each.numerics.bitwise:
        assert found == wanted
    else:
        assert torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=each.numerics.rtol)


@pytest.mark.parametrize("name", NAMES)
def test_each_has_words_lines_and_a_tolerance_with_its_reason(name: str) -> None:
    each = treatment(name)
    assert each.lines
    assert each.numerics.why
    assert each.cures == CURES[name]


def test_the_table_of_cures_names_every_treatment() -> None:
    assert {each.name for each in TREATMENTS} <= set(CURES)
    assert "prefetch" in treatments_for("pageable-copy")
    assert treatments_for("worker-respawn") == ("persistent_workers",)
    assert treatments_for("data-wait") == ("prefetch", "persistent_workers", "dataloader_workers")
    assert treatments_for("no-such-code") == ()


# ---- what each does while it is applied


def test_fused_adam_steps_as_the_plain_one_and_keeps_counting() -> None:
    plain, fused = small_loop("adam"), small_loop("adam")
    for loop in (plain, fused):
        loop.model.eval()  # type: ignore[union-attr]
        train(loop, 2)
    with treatment("fused_optimizer").applied(fused):
        assert fused.optimizers[0].param_groups[0]["fused"] is True
        train(fused, 3)
    train(plain, 3)
    for mine, theirs in zip(fused.model.parameters(), plain.model.parameters(), strict=True):  # type: ignore[union-attr]
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    steps = {int(held["step"]) for held in fused.optimizers[0].state.values()}
    assert steps == {5}
    train(fused, 1)  # and the plain kernel takes the state over


def test_bf16_computes_the_forward_pass_in_bf16_and_gives_float32() -> None:
    loop = small_loop()
    seen: list[torch.dtype] = []
    loop.model[5].register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))  # type: ignore[index]
    with treatment("bf16_autocast").applied(loop):
        out = loop.model(torch.randn(2, 3, 8, 8))  # type: ignore[misc]
    assert (seen, out.dtype) == ([torch.bfloat16], torch.float32)
    assert not torch.is_autocast_enabled("cpu")


def test_channels_last_lays_out_weights_state_and_inputs() -> None:
    loop = small_loop("sgd")
    train(loop, 1)
    weight = loop.model[0].weight  # type: ignore[index]
    seen: list[bool] = []
    loop.model[0].register_forward_hook(  # type: ignore[index]
        lambda _m, args, _o: seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )
    with treatment("channels_last").applied(loop):
        train(loop, 1)
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert not weight.is_contiguous()
        momentum = loop.optimizers[0].state[weight]["momentum_buffer"]
        assert momentum.is_contiguous(memory_format=torch.channels_last)
        trained = weight.detach().clone()
    assert seen == [True]
    assert torch.equal(weight, trained)
    assert weight.is_contiguous()


def test_channels_last_brings_back_a_gradient_and_state_that_came_inside() -> None:
    loop = small_loop("sgd")
    with treatment("channels_last").applied(loop):
        train(loop, 1)
        loop.model(torch.randn(2, 3, 8, 8)).sum().backward()  # type: ignore[misc]
    weight = loop.model[0].weight  # type: ignore[index]
    assert weight.grad.is_contiguous()
    assert loop.optimizers[0].state[weight]["momentum_buffer"].is_contiguous()


def test_set_to_none_overrules_a_script_that_zeroes() -> None:
    loop = small_loop()
    model = loop.model
    assert model is not None
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    with treatment("set_to_none").applied(loop):
        loop.optimizers[0].zero_grad(set_to_none=False)
    assert all(p.grad is None for p in model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    loop.optimizers[0].zero_grad(set_to_none=False)
    assert all(p.grad is not None for p in model.parameters())


def test_our_clip_stands_in_where_the_name_was_imported_before() -> None:
    loop = small_loop()
    model = loop.model
    assert model is not None
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    twin = copy.deepcopy([p.grad for p in model.parameters()])
    norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in twin]))
    with treatment("our_clip").applied(loop):
        called = imported_by_name.__closure__[0].cell_contents
        assert called.__module__.startswith("perfdoctor.")
        assert torch.allclose(imported_by_name(model.parameters(), 0.5), norm)
    for p, grad in zip(model.parameters(), twin, strict=True):
        assert torch.allclose(p.grad, grad * (0.5 / (norm + 1e-6)), rtol=1e-5)


def test_gc_is_off_inside_and_what_the_user_froze_stays_frozen() -> None:
    loop = small_loop()
    with treatment("gc_frozen").applied(loop):
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.freeze()
    frozen = gc.get_freeze_count()
    with treatment("gc_frozen").applied(loop):
        pass
    assert gc.get_freeze_count() == frozen > 0


def test_a_line_that_reads_gets_every_tenth_value() -> None:
    loop = dataclasses.replace(small_loop(), optimizers=())  # without one, each pass of a line is a step
    with treatment("log_every_n").applied(loop):
        read = [torch.tensor(float(step)).item() for step in range(21)]
        other = [float(torch.tensor(step)) for step in range(3)]
    assert read == [0.0] * 10 + [10.0] * 10 + [20.0]
    assert other == [0.0] * 3
    assert torch.tensor(4.0).item() == 4.0


def test_workers_load_the_same_batches_in_the_same_order_and_are_ended() -> None:
    loop = small_loop()
    wanted = [labels.tolist() for _, labels in loop.loader]  # type: ignore[union-attr]
    with treatment("dataloader_workers").applied(loop):
        assert loop.loader.num_workers >= 1  # type: ignore[union-attr]
        assert [labels.tolist() for _, labels in loop.loader] == wanted  # type: ignore[union-attr]
        workers = list(loop.loader._iterator._workers)  # type: ignore[union-attr]
        assert all(worker.is_alive() for worker in workers)
    assert not any(worker.is_alive() for worker in workers)
    assert [labels.tolist() for _, labels in loop.loader] == wanted  # type: ignore[union-attr]


WORKERS = """
import torch
from torch.utils.data import DataLoader
from perfdoctor.treat.switches import treatment
from perfdoctor.treat.treatment import Loop
loader = DataLoader(torch.arange(8.0), batch_size=2)
loop = Loop(device=torch.device("cpu"), loader=loader)
print(treatment("dataloader_workers").refuses(loop) or "fits")
with treatment("dataloader_workers").applied(loop):
    {then}
"""


@pytest.mark.skipif(hasattr(multiprocessing.util, "_SUN_PATH_MAX"), reason="needs a Python before 3.14 (late 3.13)")
@pytest.mark.parametrize(
    ("length", "then", "said"),
    [
        (75, "print(sum(batch.sum().item() for batch in loader))", "fits\n28.0\n"),
        (76, "print('not tried: it would stand still')", "has too long a name"),
    ],
)
def test_workers_that_could_not_hand_over_a_tensor_are_refused(length: int, then: str, said: str) -> None:
    """Their sockets' names are 32 letters longer than that of the folder; Linux takes 107."""
    root = tempfile.mkdtemp(prefix="w", dir="/tmp")
    folder = f"{root}/{'x' * (length - len(root) - 1)}"
    os.mkdir(folder)
    try:
        code = [sys.executable, "-c", WORKERS.format(then=then)]
        found = subprocess.run(
            code, env={**os.environ, "TMPDIR": folder}, capture_output=True, text=True, timeout=120, check=True
        )
        assert said in found.stdout
    finally:
        shutil.rmtree(root)


def test_treatments_combine_and_come_off_in_reverse() -> None:
    loop = small_loop("sgd")
    train(loop, 1)
    before = configuration(loop)
    with treated(loop, "fused_optimizer", "channels_last", "set_to_none", "bf16_autocast") as inside:
        assert len(train(inside, 3)) == 3
    assert configuration(loop) == before


NESTABLE = ("fused_optimizer", "channels_last", "set_to_none", "bf16_autocast", "gc_frozen")


@settings(max_examples=15)
@given(order=st.permutations(NESTABLE), kind=st.sampled_from(sorted(OPTIMIZERS)), steps=st.integers(0, 2))
def test_any_order_of_treatments_comes_off_without_a_trace(order: list[str], kind: str, steps: int) -> None:
    loop = small_loop(kind)
    train(loop, 1)
    before = configuration(loop)
    with treated(loop, *order) as inside:
        train(inside, steps)
    assert configuration(loop) == before


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize("old_switch", [None, False, True])
def test_tf32_comes_back_whichever_switch_the_script_used(before: str, old_switch: bool | None) -> None:
    matmul = torch.backends.cuda.matmul
    saved = torch.get_float32_matmul_precision()

    def seen() -> list[Any]:
        states: list[Any] = [getattr(matmul, "fp32_precision", None)]
        for read in (torch.get_float32_matmul_precision, lambda: matmul.allow_tf32):
            try:
                states.append(read())
            except RuntimeError:  # torch refuses to read switches that the script mixed
                states.append("mixed")
        return states

    try:
        torch.set_float32_matmul_precision(before)
        if old_switch is not None:
            matmul.allow_tf32 = old_switch
        wanted = seen()
        with treatment("tf32").applied(small_loop()):
            assert getattr(matmul, "fp32_precision", "tf32") == "tf32"
        assert seen() == wanted
    finally:
        torch.set_float32_matmul_precision(saved)


@pytest.mark.parametrize("name", LIGHT)
def test_no_treatment_adds_a_sync(name: str) -> None:
    with perfdoctor.emulate_cuda():
        device = torch.device("cuda", 0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        data = TensorDataset(torch.randn(16, 3, 8, 8), torch.zeros(16, dtype=torch.long))
        workers = 1 if name == "persistent_workers" else 0
        loop = Loop(
            device=device, model=model, optimizers=(optimizer,), loader=DataLoader(data, 8, num_workers=workers)
        )
        images, labels = torch.randn(8, 3, 8, 8, device=device), torch.zeros(8, dtype=torch.long, device=device)

        def step() -> None:
            nn.functional.cross_entropy(model(images), labels).backward()
            imported_by_name(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        step()
        assert treatment(name).refuses(loop) is None
        with treatment(name).applied(loop):
            step()
            with perfdoctor.sync_guard(budget=0):
                step()


# ---- refusals


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": "cuda"}, "Loop\\(device='cuda'\\): needs a torch.device"),
        ({"device": torch.device("cpu"), "model": lambda x: x}, "needs a torch.nn.Module, not function"),
        ({"device": torch.device("cpu"), "optimizers": torch.optim.SGD([torch.ones(1)])}, "needs a tuple .* not SGD"),
        (
            {"device": torch.device("cpu"), "optimizers": (torch.nn.Linear(1, 1),)},
            "holds Linear, which is no optimizer",
        ),
    ],
)
def test_a_loop_of_other_things_says_what_it_needs(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Loop(**given)


def test_those_that_change_the_loader_are_known_by_name() -> None:
    assert {each.name for each in LOADER} == OF_THE_LOADER
