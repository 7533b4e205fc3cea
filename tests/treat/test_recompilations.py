"""graph_breaks: every recompilation with its guard, what sets it off, and advice that works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_parts import line_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfdoctor.treat.graph_breaks import graph_breaks
from perfdoctor.treat.recompilations import explain_guard, first_guard

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X = torch.linspace(-1, 1, 16).reshape(4, 4)


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ x).relu().sum()


def test_a_ragged_last_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    calls = [(torch.randn(6, 4),)] * 3 + [(torch.randn(2, 4),)] * 2
    (again,) = graph_breaks(torch.compile(model, backend="eager"), calls=calls).recompilations
    assert (again.kind, again.count, again.at_calls, again.limit_hit) == ("size", 1, (3,), False)
    assert "dimension 0 was 6 and is now 2" in again.reason
    assert "drop_last=True" in again.change


def scaled(x: torch.Tensor, lr: float) -> torch.Tensor:
    return x * lr


def test_a_float_that_changes_until_the_limit() -> None:
    fast = torch.compile(scaled, backend="eager", dynamic=False)
    found = graph_breaks(fast, calls=[(X, 0.1 * 0.9**i) for i in range(12)])
    (again,) = found.recompilations
    assert (again.kind, again.limit_hit) == ("number", True)
    assert again.count == torch._dynamo.config.cache_size_limit  # the last one is refused: it runs eagerly
    assert again.guard == "lr == 0.1"
    assert "tensor" in again.change
    assert again.function.line == line_of(scaled, "def scaled")
    assert len(found) == 0


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.linear(x) * self.step


def test_a_step_counter_on_the_module() -> None:
    model = Counting()
    (again,) = graph_breaks(model, calls=[(X,)] * 4).recompilations
    assert (again.kind, again.count) == ("attribute", 3)
    assert "counter outside" in again.change
    assert model.step == 0


TICKS = 0


def uses_a_global(x: torch.Tensor) -> torch.Tensor:
    return x * TICKS


def counts_a_global(x: torch.Tensor) -> torch.Tensor:
    global TICKS
    TICKS += 1
    return torch.compile(uses_a_global, backend="eager", dynamic=False)(x)


def test_a_global_counter() -> None:
    found = graph_breaks(counts_a_global, calls=[(X,)] * 4)
    (again,) = found.recompilations
    assert (again.kind, again.count) == ("global", 3)
    assert "TICKS" in again.reason
    assert TICKS == 0


def test_dtype_and_grad_mode() -> None:
    for other, kind in ((X.double(), "dtype"), (X.clone().requires_grad_(), "grad mode"), (X.t(), "stride")):
        (again,) = graph_breaks(whole, calls=[(X,), (other,), (X,)]).recompilations
        assert (again.kind, again.count, again.at_calls) == (kind, 1, (1,))


@pytest.mark.parametrize(
    ("guard", "kind"),
    [
        ("tensor 'L['x']' size mismatch at index 1. expected 24, actual 8", "size"),
        ("tensor 'x' dtype mismatch. expected Float, actual Double", "dtype"),
        ("L['lr'] == 0.01", "attribute"),
        ("lr == 1e-05", "number"),
        ("mode == 'train'", "value"),
        ("G['STEP'] == 3", "global"),
        ("self.step == 3", "attribute"),
        ("self.training", "training mode"),
        ("len(xs) == 3", "length"),
        ("___check_obj_id(fn, 140)", "object"),
        ("G['CONFIG']['w'] == 2", "global"),
        ("args[1] == 0.5", "number"),
        ("list(dict.keys(d))[0] == 'a'", "keys"),
        ("set.__contains__(names, 'a')", "keys"),
        ("expected type of 'x' to be a tensor type, ' but found <class 'torch.nn.parameter.Parameter'>", "object"),
        ("GLOBAL_STATE changed: grad_mode", "grad mode"),
        ("something new", "other"),
    ],
)
def test_guards_in_plain_words(guard: str, kind: str) -> None:
    words = explain_guard(guard)
    assert words.kind == kind
    assert words.reason
    assert words.change
    assert "{" not in words.reason + words.change


def test_the_guard_is_cut_out_of_dynamos_line() -> None:
    assert (
        first_guard(["3/0: s.step == 0           # def forward(s): ...  # a.py:3 in forward\nUser stack"])
        == "s.step == 0"
    )
    assert first_guard(["0/0: BACKEND_MATCH failure: another backend"]) is None
    assert first_guard([]) is None


def test_the_limit_under_fullgraph_is_listed_and_no_error() -> None:
    fast = torch.compile(scaled, backend="eager", dynamic=False, fullgraph=True)
    found = graph_breaks(fast, calls=[(X, 0.1 * 0.9**i) for i in range(12)])
    (again,) = found.recompilations
    assert (again.kind, again.limit_hit, found.ended) == ("number", True, True)
    assert again.count == torch._dynamo.config.cache_size_limit


def summed(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


@pytest.mark.parametrize("compiled", [True, False])
def test_the_loader_of_a_ragged_last_batch_is_named(compiled: bool) -> None:
    loader = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=8)
    DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=7)
    fn = torch.compile(nn.Linear(4, 4), backend="eager") if compiled else summed
    (again,) = graph_breaks(fn, calls=[(x,) for (x,) in loader]).recompilations
    assert again.cause is not None
    assert again.cause.line == line_of(test_the_loader_of_a_ragged_last_batch_is_named, "loader = ")
    assert f"the last batch of the loader built at {again.cause}" in str(again)


def test_sizes_that_no_loader_gives_have_no_cause() -> None:
    loader = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=8, drop_last=True)
    assert len(loader) == 2
    (again,) = graph_breaks(scaled, calls=[(torch.randn(8, 4), 2.0), (torch.randn(4, 4), 2.0)]).recompilations
    assert again.cause is None


def test_the_line_that_asked_is_no_call_of_the_function() -> None:
    (again,) = graph_breaks(scaled, calls=[(X, 0.1), (X, 0.2)]).recompilations
    assert again.call is None
    assert str(again).startswith(f"{__file__}:{line_of(scaled, 'def scaled')}")


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.tau


def test_the_advice_for_a_float_attribute_works() -> None:
    model = Annealed()

    def step(x: torch.Tensor) -> Any:
        out = fast(x)
        model.tau *= 0.5
        return out

    fast = torch.compile(model, backend="eager", dynamic=False)
    (again,) = graph_breaks(step, calls=[(X,)] * 4).recompilations
    assert "tau = torch.tensor(1.0, device=...)" in again.change
    assert "tau.fill_(value)" in again.change
    model.tau = torch.tensor(1.0)  # type: ignore[assignment]
    assert not graph_breaks(step, calls=[(X,)] * 4).recompilations
