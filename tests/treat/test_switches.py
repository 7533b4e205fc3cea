"""Switches as treatments: applied, they do what they say; undone, everything is as before; refused with a reason."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_by_name
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import perfdoctor
from perfdoctor.errors import TreatmentRefused, UsageError
from perfdoctor.treat.cures import CURES, treatments_for
from perfdoctor.treat.switches import TREATMENTS, treated, treatment
from perfdoctor.treat.treatment import Loop

CPU = torch.device("cpu")
OWN = ("graphed_step",)  # tested where it is written
NAMES = [each.name for each in TREATMENTS if each.name not in OWN]
# What torch.compile needs a C++ compiler for is tested in test_compiled.
LIGHT = [name for name in NAMES if not name.startswith("compile")]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
}


def small_loop(kind: str = "adam", workers: int = 0) -> Loop:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * 6 * 6, 5)
    )
    data = TensorDataset(torch.randn(24, 3, 8, 8), torch.randint(0, 5, (24,)))
    loader = DataLoader(data, batch_size=8, num_workers=workers)
    return Loop(device=CPU, model=model, optimizers=(OPTIMIZERS[kind](model.parameters()),), loader=loader)


def train(loop: Loop, steps: int) -> list[float]:
    """As a user's script would, on the loop's live objects."""
    losses = []
    model, optimizer = loop.model, loop.optimizers[0]
    assert model is not None
    batches = [batch for _ in range(steps) for batch in loop.loader or ()][:steps]
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        imported_by_name(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def configuration(loop: Loop) -> dict[str, Any]:
    """Everything of a loop and of the process that a treatment may touch, but no trained value."""
    model, optimizer, loader = loop.model, loop.optimizers[0], loop.loader
    assert model is not None
    tensors = dict(model.state_dict(keep_vars=True))
    return {
        "addresses": {name: (tensor.data_ptr(), tensor.stride(), tensor.dtype) for name, tensor in tensors.items()},
        "modules": [sorted(vars(each)) for each in model.modules()],
        "hooks": [len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules()],
        "compiled": model._compiled_call_impl,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "optimizer": sorted(vars(optimizer)),
        "state": {
            (index, name): (value.device, value.dtype, value.stride())
            for index, held in enumerate(optimizer.state.values())
            for name, value in held.items()
            if isinstance(value, torch.Tensor)
        },
        "loader": {k: v for k, v in vars(loader).items() if isinstance(v, bool | int | str | type(None))},
        "loader_type": type(loader),
        "gc": (gc.isenabled(), gc.get_freeze_count()),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": torch.backends.cudnn.benchmark,
        "tensor": {name: vars(torch.Tensor).get(name) for name in ("item", "tolist", "__float__", "__int__")},
        "clip": imported_by_name.__closure__[0].cell_contents,
    }


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
    loop = small_loop()
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


def test_treatments_combine_and_come_off_in_reverse() -> None:
    loop = small_loop("sgd")
    train(loop, 1)
    before = configuration(loop)
    with treated(loop, "fused_optimizer", "channels_last", "set_to_none", "bf16_autocast") as inside:
        assert len(train(inside, 3)) == 3
    assert configuration(loop) == before


NESTABLE = ("fused_optimizer", "channels_last", "set_to_none", "bf16_autocast", "gc_frozen")


@settings(max_examples=15, deadline=None)
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


def reason(name: str, **fields: Any) -> str:
    loop = Loop(**{"device": CPU, **fields})
    found = treatment(name).refuses(loop)
    assert found
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_loop_is_refused_with_what_is_missing(name: str) -> None:
    if name == "gc_frozen":
        assert treatment(name).refuses(Loop(device=CPU)) is None
        return
    assert any(word in reason(name) for word in ("pass", "needs", "CUDA"))


@pytest.mark.parametrize(
    "name",
    ["tf32", "cudnn_benchmark", "pin_memory", "prefetch", "log_every_n", "our_clip", "compile_reduce_overhead",
     "compile_max_autotune"],
)  # fmt: skip
def test_what_needs_cuda_says_where_the_loop_runs(name: str) -> None:
    loop = small_loop()
    assert "cpu" in reason(name, model=loop.model, optimizers=loop.optimizers, loader=loop.loader).lower()


def test_refusals_name_what_does_not_fit() -> None:
    linear = nn.Linear(3, 3)
    loop = small_loop()
    assert "convolution" in reason("channels_last", model=linear)
    assert "bfloat16" in reason("bf16_autocast", model=nn.Linear(3, 3, dtype=torch.bfloat16))
    assert "no floating-point" in reason("bf16_autocast", model=nn.ReLU())
    assert "IterableDataset" in reason("dataloader_workers", loader=DataLoader(Stream()))
    assert "list" in reason("dataloader_workers", loader=[1, 2])
    assert "no workers" in reason("persistent_workers", loader=loop.loader)
    already = DataLoader(TensorDataset(torch.zeros(4)), num_workers=1, persistent_workers=True)
    assert "already" in reason("persistent_workers", loader=already)
    assert "already" in reason("dataloader_workers", loader=already)
    assert "channels_last already" in reason(
        "channels_last", model=nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    )


def test_fused_refuses_what_has_no_fused_kernel() -> None:
    class Own(torch.optim.SGD):
        pass

    p = [nn.Parameter(torch.zeros(3))]
    assert "RMSprop has no fused kernel" in reason("fused_optimizer", optimizers=(torch.optim.RMSprop(p),))
    assert "Own has no fused kernel" in reason("fused_optimizer", optimizers=(Own(p, lr=0.1),))
    assert "fused already" in reason("fused_optimizer", optimizers=(torch.optim.Adam(p, fused=True),))
    mixed = [p[0], nn.Parameter(torch.zeros(3, device="meta"))]
    assert "several devices (cpu, meta)" in reason("fused_optimizer", optimizers=(torch.optim.Adam(mixed),))
    assert "differentiable" in reason("fused_optimizer", optimizers=(torch.optim.Adam(p, differentiable=True),))


def test_what_is_refused_is_not_applied() -> None:
    with pytest.raises(TreatmentRefused, match="tf32: TF32 needs a CUDA device"), treated(small_loop(), "tf32"):
        pass
    with pytest.raises(UsageError, match=r"no treatment 'turbo'; there are: .*prefetch"):
        treatment("turbo")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))
