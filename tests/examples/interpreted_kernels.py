"""The examples' Triton kernels on CPU tensors. Run by test_kernels.py in a process where TRITON_INTERPRET=1 is set."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

# NumPy, which runs the kernels here, warns about overflow in exp and inf - inf; the kernels mean both.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1,), (7,), (1023,), (1025,), (2, 4097), (33, 65), (2, 3, 70), (3, 1), (0,), (4, 0), (0, 5))
ELEMENTWISE = ("vector_add", "gelu")
ROWWISE = ("softmax", "layer_norm")


def triton_variant(name: str) -> tuple[Any, Any]:
    example = importlib.import_module(name)
    return example, next(variant for variant in example.VARIANTS if variant.kind == "triton")


def error(name: str, inputs: tuple[Tensor, ...], **choices: Any) -> float:
    """The largest difference from float64, over what is allowed for one rounding (two with bfloat16).

    Triton's interpreter cuts float32 off where a GPU rounds it to bfloat16.
    """
    from variants import error_of

    example, variant = triton_variant(name)
    found = error_of(example, variant, inputs, variant.run(*inputs, **choices))
    return found / 2 if inputs[0].dtype == torch.bfloat16 else found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ELEMENTWISE + ROWWISE)
def test_odd_shapes(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in SHAPES:
        inputs = importlib.import_module(name).make_inputs(shape, dtype, CPU)
        result = triton_variant(name)[1].run(*inputs)
        assert (result.shape, result.dtype) == (inputs[0].shape, dtype)
        assert error(name, inputs) <= 1, shape


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_views_off_a_boundary(name: str) -> None:
    inputs = tuple(tensor[1:] for tensor in importlib.import_module(name).make_inputs((3001,), torch.float32, CPU))
    assert error(name, inputs) <= 1


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_programs_that_take_several_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiling

    monkeypatch.setattr(tiling, "num_programs", lambda pieces, programs, device: min(pieces, 2))
    inputs = importlib.import_module(name).make_inputs((1000,), torch.float32, CPU)
    assert error(name, inputs, tiling=tiling.Tiling(block=64, programs=2)) <= 1


def test_gelu_where_it_is_flat_and_beyond() -> None:
    values = [0.0, -0.0, 1e-30, -1e-30, 5.0, -5.0, -9.0, -15.0, 100.0, -100.0, 1e20, -1e20, torch.inf, torch.nan]
    assert error("gelu", (torch.tensor(values),)) <= 1
    _, variant = triton_variant("gelu")
    assert variant.run(torch.tensor([-torch.inf])).isnan().all()  # 0.5 * -inf * (1 + -1), as in PyTorch


def softmax_rows(columns: int = 300) -> Tensor:
    """Rows with masked places, all masked, with both infinities and with a NaN."""
    rows = torch.randn(7, columns)
    rows[0, ::2] = -torch.inf
    rows[1] = -torch.inf
    rows[2, 5] = torch.inf
    rows[3, : columns - 1] = -torch.inf
    rows[4, 7] = torch.nan
    rows[5] = -torch.inf
    rows[5, 150] = torch.nan
    rows[6] *= 1e4
    return rows


def test_softmax_of_masked_rows() -> None:
    from softmax import RowPlan

    torch.manual_seed(1)
    rows = softmax_rows()
    for plan in (None, RowPlan(num_warps=4, rows=4), RowPlan(num_warps=4, tile=64), RowPlan(num_warps=4, tile=512)):
        assert error("softmax", (rows,), plan=plan) <= 1, plan
        found = triton_variant("softmax")[1].run(rows, plan=plan)
        assert found[1].isnan().all()
        assert found[3].tolist() == [0.0] * 299 + [1.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [256, 2048, 4096])
def test_softmax_of_rows_that_fill_their_block(columns: int, dtype: torch.dtype) -> None:
    """A power of two of columns: without masks from 2048 on, several rows a program below."""
    from softmax import RowPlan

    torch.manual_seed(3)
    rows = softmax_rows(columns).to(dtype)
    for plan in (None, RowPlan(num_warps=4, registers=40), RowPlan(num_warps=4, programs=1, stages=3)):
        assert error("softmax", (rows,), plan=plan) <= 1, plan
    found = triton_variant("softmax")[1].run(rows)
    assert found[1].isnan().all()
    assert found[3].tolist() == [0.0] * (columns - 1) + [1.0]


def test_online_softmax_of_any_length() -> None:
    from softmax import RowPlan

    for columns in (1, 63, 64, 65, 1000):
        for dtype in DTYPES:
            rows = 10 * torch.randn(3, columns).to(dtype)
            rows[0] = rows[0].sort().values  # the maximum rises all the way
            assert error("softmax", (rows,), plan=RowPlan(num_warps=4, tile=64)) <= 1


def test_rows_that_do_not_fit_go_online() -> None:
    from softmax import LONGEST_IN_REGISTERS, plan_for

    assert plan_for(LONGEST_IN_REGISTERS).tile is None
    assert plan_for(LONGEST_IN_REGISTERS + 1).tile is not None
    assert error("softmax", (torch.randn(2, LONGEST_IN_REGISTERS + 1),)) <= 1


def test_layer_norm_keeps_nan_and_large_means() -> None:
    x, skip, weight, bias = importlib.import_module("layer_norm").make_inputs((4, 500), torch.float32, CPU)
    x[1, 3] = torch.nan
    assert error("layer_norm", (x, skip, weight, bias)) <= 1
    # With a mean of 1000, float32 has 6e-5 left for each value, and so has the normalised one.
    shifted = triton_variant("layer_norm")[1].run(x[2:] + 1000.0, skip[2:], weight, bias)
    reference = importlib.import_module("layer_norm").reference((x[2:] + 1000.0), skip[2:], weight, bias)
    assert (shifted - reference).abs().max() < 1e-3


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (9, 1025), (2, 3, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layer_norm_backward(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from layer_norm import block_triton, block_unfused, make_inputs

    torch.manual_seed(2)
    inputs = [tensor.requires_grad_() for tensor in make_inputs(shape, dtype, CPU)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    above = torch.randn(shape).to(dtype)
    block_triton(*inputs).backward(above)
    block_unfused(*exact).backward(above.double())
    for mine, reference in zip(inputs, exact, strict=True):
        assert mine.grad is not None
        assert reference.grad is not None
        # Sums over up to nine rows of values of about 1; the two-byte type is rounded once at the end.
        allowed = 1e-5 if dtype == torch.float32 else 2e-3
        scale = max(1.0, float(reference.grad.abs().max()))
        assert (mine.grad.double() - reference.grad).abs().max() <= allowed * scale


def test_layer_norm_backward_twice_is_an_error() -> None:
    from layer_norm import block_triton

    x = torch.randn(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        block_triton(x, torch.randn(2, 4), torch.ones(4), torch.zeros(4)).square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_of_long_rows_rounds_once(dtype: torch.dtype) -> None:
    from layer_norm import LONGEST_IN_REGISTERS, block_unfused, make_inputs
    from variants import error_of

    torch.manual_seed(4)
    example, variant = triton_variant("layer_norm")
    for shape in ((2, LONGEST_IN_REGISTERS + 1), (100_003,)):
        inputs = make_inputs(shape, dtype, CPU)
        found = variant.run(*inputs)
        assert found.dtype == dtype
        assert error_of(example, variant, inputs, found) <= 1, shape
        if dtype == torch.float32:
            assert torch.equal(found, block_unfused(*inputs))


@pytest.mark.parametrize("name", ELEMENTWISE + ROWWISE)
def test_every_configuration(name: str) -> None:
    from variants import error_of

    example = importlib.import_module(name)
    inputs = example.make_inputs((3, 130), torch.float32, CPU)
    triton = [variant for variant in example.configurations() if variant.kind == "triton"]
    assert len(triton) >= 6
    for variant in triton:
        assert error_of(example, variant, inputs, variant.run(*inputs)) <= 1, variant.name
