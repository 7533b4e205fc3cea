"""What a loop does while a switch is on: checkpoints, copies of the model, skipped steps, lines that read twice."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from switch_loops import CPU, LIGHT, configuration, small_loop, train
from torch import nn
from transformers.utils import ModelOutput

from perfdoctor.emulate import emulate_cuda
from perfdoctor.treat.compiled import compile_model
from perfdoctor.treat.switches import TREATMENTS, treatment
from perfdoctor.treat.treatment import Loop

TWICE = [name for name in LIGHT if name not in ("pin_memory", "prefetch", "tf32", "cudnn_benchmark")]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("name", TWICE)
def test_one_switch_twice_ends_in_either_order(name: str, order: Sequence[int]) -> None:
    loop = small_loop(workers=1 if name == "persistent_workers" else 0)
    before, on_cuda = configuration(loop), dataclasses.replace(loop, device=torch.device("cuda"))
    with emulate_cuda():
        given = on_cuda if name in ("our_clip", "log_every_n") else loop
        contexts = [treatment(name).applied(given) for _ in range(2)]
        for context in contexts:
            context.__enter__()
        for index in order:
            contexts[index].__exit__(None, None, None)
        assert configuration(loop) == before
    gc.unfreeze()


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw_amsgrad"])
def test_a_checkpoint_loaded_inside_takes_no_setting_out(kind: str) -> None:
    loop = small_loop(kind)
    optimizer = loop.optimizers[0]
    train(loop, 1)
    before = configuration(loop)
    with treatment("fused_optimizer").applied(loop):
        train(loop, 1)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(loop, 1)
    after = configuration(loop)
    assert (after["groups"], after["optimizer"], after["state"]) == (
        before["groups"], before["optimizer"], before["state"],
    )  # fmt: skip


@pytest.mark.usefixtures("memory_as_found")
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_first_step_that_a_scaler_skips_leaves_no_momentum(nesterov: bool) -> None:
    def trained(name: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.1)
        loop = Loop(device=CPU, model=model, optimizers=(optimizer,))
        scaler = torch.amp.GradScaler("cpu")
        context = treatment(name).applied(loop) if name else None
        if context is not None:
            context.__enter__()
        for step in range(4):
            scaler.scale(model(torch.full((1, 3), float(step))).sum()).backward()
            if step in (0, 2):
                model.weight.grad[0] = float("inf")  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if context is not None:
            context.__exit__(None, None, None)
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        return [p.detach() for p in model.parameters()]

    for plain, fused in zip(trained(None), trained("fused_optimizer"), strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-7)


def test_a_parameter_whose_first_gradient_comes_late_is_trained_as_without_the_switch() -> None:
    def trained(name: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loop = Loop(device=CPU, model=model, optimizers=(optimizer,))
        with treatment(name).applied(loop) if name else contextlib.nullcontext():
            for step in range(4):
                model[0].requires_grad_(step > 1)
                model(torch.ones(1, 2)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    for plain, fused in zip(trained(None), trained("fused_optimizer"), strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-7)


def test_fused_refuses_what_would_fail_or_differ_at_the_first_step() -> None:
    embedding = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    bag = nn.EmbeddingBag(5, 3, sparse=True)
    for model in (embedding, bag):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        reason = treatment("fused_optimizer").refuses(Loop(device=CPU, model=model, optimizers=(sgd,)))
        assert reason is not None
        assert "sparse=True" in reason
    other = nn.Linear(3, 1)
    beside = torch.optim.SGD(other.parameters(), lr=0.1)
    assert treatment("fused_optimizer").refuses(Loop(device=CPU, model=embedding, optimizers=(beside,))) is None
    damped = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    loop = Loop(device=CPU, model=other, optimizers=(damped,))
    assert "first step" in str(treatment("fused_optimizer").refuses(loop))
    other(torch.ones(1, 3)).sum().backward()
    damped.step()
    assert treatment("fused_optimizer").refuses(loop) is None
    no_momentum = torch.optim.SGD(other.parameters(), lr=0.1, dampening=0.5)
    assert treatment("fused_optimizer").refuses(Loop(device=CPU, model=other, optimizers=(no_momentum,))) is None


def _reloaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, _reloaded])
def test_a_copy_of_the_model_computes_with_its_own_weights(copied: Callable[[nn.Module], nn.Module]) -> None:
    loop = small_loop()
    model = loop.model
    assert model is not None
    model.eval()
    x = torch.randn(2, 3, 8, 8)
    wanted = model(x)
    with treatment("bf16_autocast").applied(loop):
        twin = copied(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert not model(x).any()
        torch.testing.assert_close(twin(x), wanted, rtol=2e-2, atol=2e-2)
    assert torch.equal(twin(x), wanted)


@pytest.mark.parametrize("copied", [copy.deepcopy, _reloaded])
def test_a_copy_of_the_model_zeroes_its_own_gradients(copied: Callable[[nn.Module], nn.Module]) -> None:
    loop = small_loop()
    assert loop.model is not None
    with treatment("set_to_none").applied(loop):
        twin = copied(loop.model)
        for parameter in (*twin.parameters(), *loop.model.parameters()):
            parameter.grad = torch.ones_like(parameter)
        twin.zero_grad()
        assert all(p.grad is None for p in twin.parameters())
        assert all(p.grad is not None for p in loop.model.parameters())


class _OwnZeroGrad(torch.optim.SGD):
    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad(set_to_none=False)


def test_a_zero_grad_of_another_signature_is_left_alone() -> None:
    model = nn.Linear(2, 1)
    optimizer = _OwnZeroGrad(model.parameters(), lr=0.1)
    alone = Loop(device=CPU, optimizers=(optimizer,))
    assert "_OwnZeroGrad.zero_grad takes no set_to_none" in str(treatment("set_to_none").refuses(alone))
    both = Loop(device=CPU, model=model, optimizers=(optimizer,))
    assert treatment("set_to_none").refuses(both) is None
    with treatment("set_to_none").applied(both):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.zero_grad()
        assert model.weight.grad is not None
        model.zero_grad(set_to_none=False)
        assert model.weight.grad is None


class _Passing(torch.optim.SGD):
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)


class _Noting(torch.optim.SGD):
    noted: Any = None

    def zero_grad(self, set_to_none: bool = True, note: Any = None) -> None:
        self.noted = note
        super().zero_grad(set_to_none)


@pytest.mark.parametrize(("kind", "more"), [(_Passing, {}), (_Noting, {"note": 3})])
def test_a_zero_grad_that_passes_set_to_none_on_is_switched(kind: Any, more: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.1)
    loop = Loop(device=CPU, optimizers=(optimizer,))
    assert treatment("set_to_none").refuses(loop) is None
    with treatment("set_to_none").applied(loop):
        weight.grad = torch.ones(2)
        optimizer.zero_grad(set_to_none=False, **more)
        assert weight.grad is None
        assert getattr(optimizer, "noted", None) == more.get("note")


class _Named(NamedTuple):
    logits: Any


@dataclasses.dataclass(frozen=True)
class _Output:
    logits: Any


class _Answering(nn.Module):
    def __init__(self, pack: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.pack = pack

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(self.inner(x))


@pytest.mark.parametrize(
    ("pack", "get"),
    [
        (_Output, lambda out: out.logits),
        (_Named, lambda out: out.logits),
        (lambda y: {"a": [y, (y, 3)]}, lambda out: out["a"][1][0]),
        (lambda y: MappingProxyType({"a": y}), lambda out: out["a"]),
        (lambda y: y.max(dim=1), lambda out: out.values),
    ],
)
def test_bf16_gives_float32_in_any_container(pack: Callable[[torch.Tensor], Any], get: Callable[[Any], Any]) -> None:
    model = _Answering(pack)
    with treatment("bf16_autocast").applied(Loop(device=CPU, model=model)):
        out = model(torch.ones(1, 2))
    assert get(out).dtype == torch.float32
    assert type(out) is type(model(torch.ones(1, 2)))


@dataclasses.dataclass
class _ModelOutput(ModelOutput):  # type: ignore[misc]
    logits: Any = None


@pytest.mark.parametrize("pack", [lambda y: {"a": y}, lambda y: (y, [y]), _Output, lambda y: _ModelOutput(logits=y)])
def test_bf16_leaves_a_compiled_model_one_graph(pack: Callable[[torch.Tensor], Any]) -> None:
    model = _Answering(pack)
    x = torch.ones(1, 2)
    with treatment("bf16_autocast").applied(Loop(device=CPU, model=model)), compile_model(model, backend="eager"):
        out = model(x)
        assert type(out) is type(pack(x))
    torch._dynamo.reset()


def test_lazy_modules_are_refused_or_left_alone() -> None:
    for each in TREATMENTS:
        model = nn.Sequential(nn.LazyConv2d(3, 3), nn.Flatten(), nn.LazyLinear(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = Loop(device=CPU, model=model, optimizers=(optimizer,))
        reason = each.refuses(loop)
        if each.name == "channels_last":
            assert "run one step before" in str(reason)


def _log(value: torch.Tensor) -> float:
    return value.item()


def test_a_line_that_reads_several_values_a_step_keeps_them_apart() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: list[tuple[float, ...]] = []
    with treatment("log_every_n").applied(Loop(device=CPU, model=model, optimizers=(optimizer,))):
        optimizer.step()
        for step in range(21):
            values = {name: torch.tensor(base + step) for name, base in (("loss", 0.0), ("acc", 100.0))}
            row = [_log(values["loss"]), _log(values["acc"])]
            row += [value.item() for value in values.values()]
            optimizer.step()
            seen.append(tuple(row))
        passes = 0
        while torch.tensor(float(passes)).item() < 3:  # within one step each read is another
            passes += 1
    expected = [(float(step // 10 * 10), 100.0 + step // 10 * 10) * 2 for step in range(21)]
    assert seen == expected
    assert passes == 3
    assert not optimizer._optimizer_step_post_hooks


def test_values_are_kept_apart_before_the_first_update_too() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.0)
    seen = []
    with treatment("log_every_n").applied(Loop(device=CPU, optimizers=(optimizer,))):
        for step in range(11):
            seen.append((_log(torch.tensor(0.0 + step)), _log(torch.tensor(100.0 + step))))
            optimizer.step()
    assert seen == [(0.0, 100.0)] * 10 + [(10.0, 110.0)]


def test_passes_are_steps_where_no_update_is_seen() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.0)
    for optimizers in ((), (optimizer,), (_Standing(optimizer),)):  # the second as inside a CUDA graph
        with treatment("log_every_n").applied(Loop(device=CPU, optimizers=optimizers)):
            seen = [_log(torch.tensor(float(step))) for step in range(40)]
        assert len(set(seen[20:])) == 2


class _Standing(torch.optim.Optimizer):
    """Stands for another one, as those of libraries do; without what torch's constructor makes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups
