"""The compiled walk says what the Python walk says, and neither ever says that a moved gradient has not moved."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perfdoctor.errors import UsageError
from perfdoctor.kernels import walker
from perfdoctor.kernels.grad_stats import clip_grad_norm_, grad_norm, grad_stats


@pytest.fixture(scope="module")
def compiled() -> Any:
    module = walker.compiled_walker()
    if module is None:
        pytest.skip("no C++ compiler")
    return module


def items() -> list[Tensor]:
    parameters: list[Tensor] = []
    for index, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16, torch.float32)):
        parameter = nn.Parameter(torch.zeros(index + 2, 3, dtype=dtype))
        parameter.grad = torch.randn(index + 2, 3).to(dtype)
        parameters.append(parameter)
    parameters[3].grad = None
    leaf = torch.zeros(4, requires_grad=True)
    leaf.grad = torch.ones(4)
    return [*parameters, leaf, torch.ones(5, 6).t(), torch.zeros(0)]


@pytest.mark.parametrize("always_grad", [False, True])
def test_both_walks_agree(compiled: Any, always_grad: bool) -> None:
    chosen = items()
    rows = walker.gather_rows_in_python(chosen, always_grad)
    assert rows is not None
    assert torch.equal(compiled.gather(chosen, always_grad), rows)
    for walk in (compiled.Walk(rows), walker.PythonWalk(rows)):
        assert walk.matches(chosen, always_grad)
        assert walk.matches(chosen, always_grad)  # the hints of the first walk are no answers


def test_a_row(compiled: Any) -> None:
    chosen = items()
    rows = compiled.gather(chosen, False)
    assert rows[1].tolist() == [chosen[1].grad.data_ptr(), 9, 1 | walker.OF_PARAMETER]  # type: ignore[union-attr]
    assert rows[3].tolist() == [0, 0, walker.NO_GRADIENT]
    assert rows[5].tolist() == [chosen[5].data_ptr(), 30, 0]  # a gradient itself: transposed, but without holes


@pytest.mark.parametrize(
    "odd",
    [
        torch.ones(4, 4)[:, ::2],
        torch.ones(1).expand(3),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch._neg_view(torch.ones(2)),
    ],
    ids=["holes", "overlap", "float64", "sparse", "meta", "pending minus"],
)
def test_what_needs_python_is_left_to_it(compiled: Any, odd: Tensor) -> None:
    assert compiled.gather([odd], False) is None
    assert walker.gather_rows_in_python([odd], False) is None


def test_a_subclass_is_left_to_python(compiled: Any) -> None:
    class Marked(Tensor):
        pass

    marked = torch.ones(2).as_subclass(Marked)
    assert compiled.gather([marked], False) is None
    assert walker.gather_rows_in_python([marked], False) is None


@pytest.mark.parametrize("walks_in_python", [False, True])
def test_every_change_is_seen(compiled: Any, walks_in_python: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if walks_in_python:
        monkeypatch.setattr(walker, "compiled_walker", lambda: None)
    chosen = items()
    rows = walker.gather_rows(chosen, False)
    assert rows is not None
    walk = walker.walk_of(rows)
    assert type(walk) is (walker.PythonWalk if walks_in_python else compiled.Walk)
    assert walk.matches(chosen, False)
    old = chosen[0].grad
    assert old is not None
    for change in (None, old.clone(), old.half(), old[:1], old.t()[:, :1]):
        if (change is not None and change.shape != old.shape) or (change is not None and change.dtype != old.dtype):
            chosen[0].grad = None
            chosen[0].data = torch.zeros_like(change)
        chosen[0].grad = change
        assert not walk.matches(chosen, False)
        chosen[0].grad = None
        chosen[0].data = torch.zeros_like(old)
        chosen[0].grad = old
        assert walk.matches(chosen, False)
    assert not walk.matches(chosen[:-1], False)
    assert not walk.matches([chosen[1], chosen[0], *chosen[2:]], False)
    old.data = old.clone()  # the same object in other memory
    assert not walk.matches(chosen, False)


@pytest.mark.parametrize("walks_in_python", [False, True])
def test_pairs_match_by_name_and_address(compiled: Any, walks_in_python: bool) -> None:
    chosen = items()
    pairs = [(f"p{index}", item) for index, item in enumerate(chosen)]
    names = tuple(name for name, _ in pairs)
    rows = compiled.gather(chosen, False)
    walk = walker.PythonWalk(rows) if walks_in_python else compiled.Walk(rows)
    assert walk.matches_pairs(pairs, names)
    assert walk.matches_pairs([("".join(name), item) for name, item in pairs], names)
    assert not walk.matches_pairs([("other", chosen[0]), *pairs[1:]], names)
    assert not walk.matches_pairs(pairs[:-1], names)
    assert not walk.matches_pairs([*pairs[:-1], ("p6", torch.zeros(1))], names)
    assert not walk.matches_pairs([*pairs[:-1], (torch.zeros(0), "p6")], names)
    assert not walk.matches_pairs([*pairs[:-1], ["p6", chosen[-1]]], names)
    chosen[1].grad = chosen[1].grad.clone()  # type: ignore[union-attr]
    assert not walk.matches_pairs(pairs, names)


def test_hints_of_freed_objects_do_no_harm(compiled: Any) -> None:
    parameters: list[Tensor] = items()[:4]
    walk = compiled.Walk(compiled.gather(parameters, False))
    assert walk.matches(parameters, False)
    for _ in range(20):
        parameters = [nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
        assert not walk.matches(parameters, False)


def test_swapped_tensors_are_seen(compiled: Any) -> None:
    """The same Python objects in the same list, with each other's insides."""
    parameters: list[Tensor] = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    walk = compiled.Walk(compiled.gather(parameters, False))
    assert walk.matches(parameters, False)
    gradients = [parameter.grad for parameter in parameters]
    parameters[0].grad, parameters[1].grad = gradients[1], gradients[0]
    assert not walk.matches(parameters, False)
    del gradients
    torch.utils.swap_tensors(parameters[0], parameters[1])
    assert walk.matches(parameters, False)


def test_gradients_without_memory_are_left_to_torch(compiled: Any) -> None:
    resized = torch.ones(4)
    resized.untyped_storage().resize_(0)
    for odd in (resized, torch._efficientzerotensor((3,))):
        assert compiled.gather([odd], False) is None
        assert walker.gather_rows_in_python([odd], False) is None

    def seen(x: Tensor) -> Tensor:
        assert compiled.gather([x], False) is None
        assert walker.gather_rows_in_python([x], False) is None
        return x * 1

    torch.func.vmap(seen)(torch.ones(2, 3))


def test_versions_are_bumped(compiled: Any) -> None:
    chosen = items()[:4]
    before = [item.grad._version if item.grad is not None else math.nan for item in chosen]
    compiled.bump_versions(chosen)
    after = [item.grad._version if item.grad is not None else math.nan for item in chosen]
    assert after[:3] == [version + 1 for version in before[:3]]


def test_without_a_compiler_python_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(walker, "load_extension", fail)
    walker.compiled_walker.cache_clear()
    try:
        assert walker.compiled_walker() is None
        rows = walker.gather_rows([torch.ones(3)], False)
        assert rows is not None
        assert rows.tolist()[0][1:] == [3, 0]
    finally:
        walker.compiled_walker.cache_clear()


@pytest.mark.parametrize("start", [0, 3])
def test_a_gradient_whose_memory_is_gone(compiled: Any, start: int) -> None:
    """A view into storage that was resized to nothing has its offset as its address: not 0, and no memory either."""
    whole = torch.ones(8)
    gone = whole[start : start + 2]
    chosen = [torch.ones(2), gone]
    rows = compiled.gather(chosen, False)
    walks = (compiled.Walk(rows), walker.PythonWalk(rows))
    whole.untyped_storage().resize_(0)
    assert compiled.gather(chosen, False) is None
    assert walker.gather_rows_in_python(chosen, False) is None
    assert not any(walk.matches(chosen, False) for walk in walks)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = gone
    for read in (grad_norm, lambda items: clip_grad_norm_(items, 1.0), lambda items: grad_stats([("a", items[0])])):
        with pytest.raises(UsageError, match=r"gradient 0 \(shape \(2,\)\) has no memory"):
            read([parameter])


def test_nothing_to_read_is_no_gone_memory() -> None:
    chosen = [torch.zeros(0), torch._efficientzerotensor((2,)), torch.full((2,), 3.0)]
    assert float(grad_norm(chosen)) == pytest.approx(math.sqrt(18), rel=1e-6)
