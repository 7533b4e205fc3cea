"""The tutorial kernels on a GPU: every variant and every configuration against float64."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1,), (7,), (1023,), (1025,), (100_003,), (33, 65), (17, 4096), (3, 2, 70), (5, 1), (0,), (4, 0), (0, 5))
TENSORS = ("vector_add", "gelu", "softmax", "layer_norm")
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _free_memory() -> None:
    torch.manual_seed(0)
    torch.cuda.empty_cache()


def error(name: str, inputs: tuple[Any, ...], variant: Any) -> float:
    from variants import error_of

    return error_of(importlib.import_module(name), variant, inputs, variant.run(*inputs))


def of_kind(name: str, *kinds: str) -> list[Any]:
    return [variant for variant in importlib.import_module(name).VARIANTS if variant.kind in kinds]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TENSORS)
def test_odd_shapes(name: str, dtype: torch.dtype) -> None:
    example = importlib.import_module(name)
    for shape in SHAPES:
        if name == "layer_norm" and shape[-1] == 0:
            continue  # the mean of nothing
        inputs = example.make_inputs(shape, dtype, GPU)
        for variant in of_kind(name, "torch", "triton", "cuda"):
            assert error(name, inputs, variant) <= 1, (variant.name, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["vector_add", "gelu"])
def test_views_off_a_boundary(name: str, dtype: torch.dtype) -> None:
    example = importlib.import_module(name)
    for length, start in ((1, 1), (5001, 1), (5001, 3), (4097, 8)):
        inputs = tuple(tensor[start:] for tensor in example.make_inputs((length + start,), dtype, GPU))
        for variant in of_kind(name, "triton", "cuda"):
            assert error(name, inputs, variant) <= 1, (variant.name, length, start)


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own choices
@pytest.mark.parametrize("name", ["gelu", "softmax", "layer_norm"])
def test_compiled_by_torch(name: str) -> None:
    torch._dynamo.reset()
    inputs = importlib.import_module(name).make_inputs((33, 65), torch.float32, GPU)
    (variant,) = of_kind(name, "compile")
    assert error(name, inputs, variant) <= 1


@pytest.mark.parametrize(
    ("name", "shape"),
    [("vector_add", (3, 70_001)), ("gelu", (3, 70_001)), ("softmax", (300, 16384)), ("layer_norm", (700, 4096))],
)
def test_every_configuration(name: str, shape: tuple[int, ...]) -> None:
    example = importlib.import_module(name)
    inputs = example.make_inputs(shape, torch.float32, GPU)
    wrong = {variant.name: error(name, inputs, variant) for variant in example.configurations()}
    assert {name: found for name, found in wrong.items() if found > 1} == {}


def test_gelu_where_it_is_flat_and_beyond() -> None:
    values = [0.0, -0.0, 1e-30, -1e-30, 5.0, -5.0, -9.0, -15.0, 100.0, -100.0, 1e20, -1e20, torch.inf, torch.nan]
    for variant in of_kind("gelu", "triton", "cuda"):
        assert error("gelu", (torch.tensor(values, device=GPU),), variant) <= 1
        assert variant.run(torch.tensor([-torch.inf], device=GPU)).isnan().all()


def test_gelu_of_every_float16_and_bfloat16() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(1 << 15), 1 << 15, device=GPU).to(torch.int16).view(dtype)
        every = every[every.isfinite()]
        for variant in of_kind("gelu", "triton", "cuda"):
            assert error("gelu", (every,), variant) <= 1


def masked_rows(columns: int) -> Tensor:
    rows = torch.randn(6, columns, device=GPU)
    rows[0, ::2] = -torch.inf
    rows[1] = -torch.inf
    rows[2, 5] = torch.inf
    rows[3, : columns - 1] = -torch.inf
    rows[4, 7] = torch.nan
    rows[5] = -torch.inf
    rows[5, 9] = torch.nan
    return rows


def test_softmax_of_masked_rows_and_of_any_length() -> None:
    (variant,) = of_kind("softmax", "triton")
    for columns in (300, 16384, 32768, 32769, 100_001):
        for dtype in DTYPES:
            assert error("softmax", (masked_rows(columns).to(dtype),), variant) <= 1, (columns, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (9, 1025), (5000, 768), (300, 4096), (3, 16384)])
def test_layer_norm_backward(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from layer_norm import block_triton, block_unfused, make_inputs

    inputs = [tensor.requires_grad_() for tensor in make_inputs(shape, dtype, GPU)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    above = torch.randn(shape, device=GPU).to(dtype)
    block_triton(*inputs).backward(above)
    block_unfused(*exact).backward(above.double())
    first = [tensor.grad.clone() for tensor in inputs if tensor.grad is not None]
    for mine, reference in zip(first, exact, strict=True):
        assert reference.grad is not None
        allowed = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}[dtype]
        scale = max(1.0, float(reference.grad.abs().max()))
        assert (mine.double() - reference.grad).abs().max() <= allowed * scale
    for tensor in inputs:
        tensor.grad = None
    block_triton(*inputs).backward(above)
    assert all(torch.equal(tensor.grad, before) for tensor, before in zip(inputs, first, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(dtype: torch.dtype) -> None:
    example = importlib.import_module("tensor_sums")
    sizes = (1, 7, 0, 1023, 1024, 1025, 100_003, 0, 3_000_000 if dtype != torch.float16 else 30_000)
    inputs = example.make_inputs(sizes, dtype, GPU)
    for variant in example.VARIANTS:
        assert error("tensor_sums", inputs, variant) <= 1, variant.name
    for variant in example.configurations():
        assert error("tensor_sums", inputs, variant) <= 1, variant.name
    shifted = [tensor[1:] for tensor in inputs[0] if tensor.numel() > 1]
    assert error("tensor_sums", (shifted, example.make_table(shifted)), of_kind("tensor_sums", "cuda")[1]) <= 1


@pytest.mark.parametrize("name", ["vector_add", "gelu"])
def test_more_than_two_to_the_31_elements(name: str) -> None:
    example = importlib.import_module(name)
    count = (1 << 31) + 1027
    if torch.cuda.mem_get_info()[0] < 10 * count:
        pytest.skip("needs 20 GB of free device memory")
    inputs = tuple(
        torch.randn(count, dtype=torch.bfloat16, device=GPU) for _ in example.make_inputs((1,), DTYPES[0], GPU)
    )
    for variant in of_kind(name, "triton", "cuda"):
        whole = variant.run(*inputs)
        for part in (slice(0, 5000), slice((1 << 31) - 5000, None)):
            pieces = tuple(tensor[part].contiguous() for tensor in inputs)
            from variants import error_of

            assert error_of(example, variant, pieces, whole[part]) <= 1, (variant.name, part)


def test_softmax_of_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of free device memory")
    from variants import error_of

    (variant,) = of_kind("softmax", "triton")
    rows = torch.randn(131_075, 16384, dtype=torch.bfloat16, device=GPU)
    last = variant.run(rows)[-4:]
    assert error_of(importlib.import_module("softmax"), variant, (rows[-4:],), last) <= 1


def test_kernels_do_not_synchronise() -> None:
    import perfdoctor

    ready = []
    for name in TENSORS:
        inputs = importlib.import_module(name).make_inputs((64, 1024), torch.float32, GPU)
        ready += [(variant, inputs) for variant in of_kind(name, "triton", "cuda")]
    sums = importlib.import_module("tensor_sums")
    kept = next(variant for variant in sums.VARIANTS if variant.name == "CUDA C++, table kept")
    ready.append((kept, sums.make_inputs((1024,) * 50, torch.float32, GPU)))
    for variant, inputs in ready:
        variant.run(*inputs)  # compiles
    with perfdoctor.sync_guard(budget=0):
        for variant, inputs in ready:
            variant.run(*inputs)
