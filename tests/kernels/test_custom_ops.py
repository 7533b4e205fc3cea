"""The custom ops keep torch's rules, and torch.compile keeps them in one graph."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perfdoctor.errors import UsageError
from perfdoctor.kernels import custom_ops  # noqa: F401 (registers the ops)
from perfdoctor.kernels.grad_stats import clip_grad_norm_, grad_norm, grad_stats


def gradients() -> list[Tensor]:
    return [torch.randn(5, 3), torch.randn(7), torch.randn(2, 2).half()]


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("once", [False, True])
def test_ops_pass_opcheck(norm_type: float, once: bool) -> None:
    ops = torch.ops.perfdoctor
    torch.library.opcheck(ops.grad_norm.default, (gradients(), norm_type, once))
    torch.library.opcheck(ops.clip_grads_.default, (gradients(), 0.5, norm_type, once))
    torch.library.opcheck(ops.grad_stats.default, (gradients(),))


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    chosen = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 3), (5,), (2,))]
    for parameter in chosen[:2]:
        parameter.grad = torch.randn_like(parameter)
    return chosen


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_compiled_norm(norm_type: float) -> None:
    chosen = parameters()
    found = compiled(lambda: grad_norm(chosen, norm_type) * 1.0)()
    torch.testing.assert_close(found, grad_norm(chosen, norm_type))


def test_compiled_clip_scales_in_place() -> None:
    ours, eager = parameters(), parameters()
    norm = compiled(lambda: clip_grad_norm_(ours, 0.5) + 0.0)()
    torch.testing.assert_close(norm, clip_grad_norm_(eager, 0.5))
    for mine, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_kernel_that_is_none_is_refused_where_a_graph_is_traced_too() -> None:
    chosen = parameters()
    for call in (lambda: grad_norm(chosen, kernel="cudnn"), lambda: clip_grad_norm_(chosen, 1.0, kernel="cudnn")):
        torch._dynamo.reset()
        with pytest.raises(UsageError, match="kernel='cudnn'"):
            torch.compile(call, backend="aot_eager")()


def test_compiled_stats() -> None:
    chosen = parameters()
    named = [(str(index), parameter) for index, parameter in enumerate(chosen)]

    def total() -> Tensor:
        return grad_stats(named).total.l2 + 0.0

    torch.testing.assert_close(compiled(total)(), grad_norm(chosen))


def test_compiled_norm_of_what_the_graph_computes() -> None:
    def norm_of_gradient(weight: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        gradient = 2 * inputs.t() @ (inputs @ weight)
        return grad_norm([gradient, gradient]), gradient  # gradients themselves: each mention counts

    norm, gradient = compiled(norm_of_gradient)(torch.randn(3, 2), torch.randn(4, 3))
    torch.testing.assert_close(norm, math.sqrt(2) * gradient.norm())
