"""The Triton kernels on CPU tensors. Run by test_triton_kernels.py in a process where TRITON_INTERPRET=1 is set."""

from __future__ import annotations

import copy
import math
import threading

import pytest
import torch
from torch import Tensor, nn

from perfdoctor.kernels import launch_route, pointer_table, walker
from perfdoctor.kernels.grad_stats import clip_grad_norm_, grad_norm, grad_stats

# NumPy, which runs the kernels here, warns about the inf * 0 that the kernels mean.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = (1, 3, 4, 7, 8, 1000, 1023, 1024, 1025, 4097, 8192, 20_000, 33_001, 0)


def parameters_of(dtypes: list[torch.dtype], shift: int, seed: int = 0) -> list[nn.Parameter]:
    """Gradients of many sizes, each `shift` elements behind a 16-byte boundary."""
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for index, size in enumerate(SIZES):
        dtype = dtypes[index % len(dtypes)]
        memory = torch.randn(size + shift, generator=generator).to(dtype)
        parameter = nn.Parameter(torch.zeros(size, dtype=dtype))
        parameter.grad = memory[shift:]
        parameters.append(parameter)
    return parameters


def values(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.grad.double().reshape(-1) for parameter in parameters if parameter.grad is not None])


@pytest.mark.parametrize("dtypes", [[dtype] for dtype in DTYPES] + [DTYPES])
@pytest.mark.parametrize("shift", [0, 1])
def test_norms(dtypes: list[torch.dtype], shift: int) -> None:
    parameters = parameters_of(dtypes, shift)
    for norm_type in (2.0, math.inf):
        norm = grad_norm(parameters, norm_type, kernel="triton")
        assert float(norm) == pytest.approx(float(torch.linalg.vector_norm(values(parameters), norm_type)), rel=1e-6)
        assert torch.equal(norm, grad_norm(parameters, norm_type, kernel="triton"))


@pytest.mark.parametrize("dtypes", [[dtype] for dtype in DTYPES] + [DTYPES])
def test_stats(dtypes: list[torch.dtype]) -> None:
    parameters = parameters_of(dtypes, 1)
    parameters[3].grad[2] = math.nan  # type: ignore[index]
    parameters[12].grad[30_000] = -math.inf  # type: ignore[index]
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    found, expected = grad_stats(named, kernel="triton"), grad_stats(named, kernel="torch")
    for mine, other in ((found.per_tensor, expected.per_tensor), (found.total, expected.total)):
        for column in ("sum", "mean", "l2", "abs_max"):
            torch.testing.assert_close(
                getattr(mine, column), getattr(other, column), rtol=1e-5, atol=2e-4, equal_nan=True, msg=column
            )
        assert torch.equal(mine.num_nonfinite, other.num_nonfinite)


@pytest.mark.parametrize("dtypes", [[dtype] for dtype in DTYPES] + [DTYPES])
@pytest.mark.parametrize("shift", [0, 1])
def test_clip(dtypes: list[torch.dtype], shift: int) -> None:
    parameters = parameters_of(dtypes, shift)
    before = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    norm = clip_grad_norm_(parameters, 2.0, kernel="triton")
    factor = 2.0 / (float(norm) + 1e-6)
    for parameter, old in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad, (old.float() * factor).to(old.dtype), rtol=1e-2, atol=1e-6)
    after = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    clip_grad_norm_(parameters, 1e9, kernel="triton")
    assert all(torch.equal(parameter.grad, old) for parameter, old in zip(parameters, after, strict=True))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_as_torch(bad: float, norm_type: float, dtype: torch.dtype) -> None:
    results = []
    for clip in (lambda p: clip_grad_norm_(p, 1.0, norm_type, kernel="triton"),
                 lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0, norm_type)):  # fmt: skip
        parameter = nn.Parameter(torch.zeros(2000, dtype=dtype))
        parameter.grad = torch.ones(2000, dtype=dtype)
        parameter.grad[77] = bad
        results.append((clip([parameter]).float(), parameter.grad))
    torch.testing.assert_close(results[0][0], results[1][0], equal_nan=True)
    torch.testing.assert_close(results[0][1], results[1][1], equal_nan=True)


def test_a_stale_table_cannot_be_had() -> None:
    """Gradients are replaced, moved, resized, retyped, dropped and swapped between calls on the same list."""
    parameters = [nn.Parameter(torch.zeros(600)) for _ in range(12)]
    generator = torch.Generator().manual_seed(1)
    kept: list[Tensor] = []
    for step in range(20):
        for index, parameter in enumerate(parameters):
            choice = int(torch.randint(0, 6, (), generator=generator))
            if choice == 0:
                parameter.grad = None
            elif choice == 1:  # other memory; the old one is freed, and often reused by another parameter
                parameter.grad = torch.randn(600, generator=generator)
            elif choice == 2 and parameter.grad is not None:
                parameter.grad.mul_(1.5)  # the same memory with other values
            elif choice == 3 and parameter.grad is not None:
                parameter.grad.data = torch.randn(600, generator=generator)  # the same object in other memory
            elif choice == 4:
                memory = torch.randn(700, generator=generator)
                kept.append(memory)
                parameter.grad = memory[index : index + 600]
        if step % 7 == 3:
            parameters[0], parameters[-1] = parameters[-1], parameters[0]
        present = [parameter for parameter in parameters if parameter.grad is not None]
        expected = float(torch.linalg.vector_norm(values(present))) if present else 0.0
        assert float(grad_norm(parameters, kernel="triton")) == pytest.approx(expected, rel=1e-6), step


def test_shared_and_odd_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(3000))
    parameter.grad = torch.randn(3000)
    expected = float(parameter.grad.double().norm())
    assert float(grad_norm([parameter, parameter], kernel="triton")) == pytest.approx(expected, rel=1e-6)
    clip_grad_norm_([parameter, parameter], expected / 2, kernel="triton")
    assert float(parameter.grad.double().norm()) == pytest.approx(expected / 2, rel=1e-5)
    table = torch.randn(64, 66)
    odd = [table[:, ::2], table.t(), table[3:5, 1:], torch.zeros(2).expand(5, 2), table[0, 0]]
    exact = math.sqrt(sum(float(view.double().square().sum()) for view in odd))
    assert float(grad_norm(odd, kernel="triton")) == pytest.approx(exact, rel=1e-6)
    double = [torch.ones(3), torch.ones(4, dtype=torch.float64)]
    assert float(grad_norm(double, kernel="triton")) == pytest.approx(math.sqrt(7), rel=1e-6)


def test_memory_that_several_gradients_share_counts_as_without_a_kernel() -> None:
    for kernel in ("triton", "torch"):
        memory = torch.ones(4)
        parameters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2, 2))]
        parameters[0].grad, parameters[1].grad = memory, memory.view(2, 2)
        assert float(grad_norm(parameters, kernel=kernel)) == 2.0
        assert float(clip_grad_norm_(parameters, 1.0, kernel=kernel)) == 2.0
        torch.testing.assert_close(memory, torch.full((4,), 0.5))


def test_statistics_follow_the_gradients() -> None:
    """A list of pairs that is passed again and again, while what it stands for changes."""
    parameters = parameters_of([torch.float32], 1)[5:9]
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    named.append(("again", parameters[1]))
    for change in range(5):
        if change == 1:
            parameters[0].grad = None
        elif change == 2:
            parameters[2].grad = torch.full_like(parameters[2], 2.0)
        elif change == 3:
            named[3] = ("renamed", parameters[3])
        elif change == 4:
            parameters[0].grad = torch.ones_like(parameters[0])
        for _ in range(2):
            found, expected = grad_stats(named, kernel="triton"), grad_stats(named, kernel="torch")
            assert found.names == expected.names
            assert found.per_tensor.l2.shape == (len(found.names),)
            torch.testing.assert_close(found.per_tensor.l2, expected.per_tensor.l2, rtol=1e-6, atol=0)
            torch.testing.assert_close(found.total.l2, expected.total.l2, rtol=1e-6, atol=0)
            torch.testing.assert_close(found.per_tensor.sum, expected.per_tensor.sum, rtol=1e-5, atol=1e-4)


def test_several_threads_at_once() -> None:
    """More lists than there are tables kept: threads evict each other's, and clip what another one reads."""
    lists = [parameters_of([torch.float32], 0, seed)[:7] for seed in range(20)]
    expected = [float(torch.linalg.vector_norm(values(each))) for each in lists]
    wrong: list[object] = []

    def work() -> None:
        try:
            for each, norm in zip(lists, expected, strict=True):
                for found in (grad_norm(each, kernel="triton"), clip_grad_norm_(each, 1e9, kernel="triton")):
                    if float(found) != pytest.approx(norm, rel=1e-6):
                        wrong.append((float(found), norm))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_tables_made_in_inference_mode_outlive_it() -> None:
    parameters = parameters_of([torch.float32], 0)
    with torch.inference_mode():
        first = float(clip_grad_norm_(parameters, 1e9, kernel="triton"))
    assert float(clip_grad_norm_(parameters, 1e9, kernel="triton")) == first
    assert float(grad_norm(parameters, kernel="triton")) == first


def test_copied_models_have_their_own_tables() -> None:
    model = nn.Linear(30, 40)
    model.weight.grad, model.bias.grad = torch.randn(40, 30), torch.randn(40)
    parameters = list(model.parameters())
    norm = float(grad_norm(parameters, kernel="triton"))
    copied = list(copy.deepcopy(model).parameters())
    assert float(grad_norm(copied, kernel="triton")) == 0.0  # a copy has no gradients
    for original, parameter in zip(parameters, copied, strict=True):
        parameter.grad = original.grad.clone()  # type: ignore[union-attr]
    clip_grad_norm_(copied, norm / 2, kernel="triton")
    assert float(grad_norm(parameters, kernel="triton")) == norm
    assert float(grad_norm(copied, kernel="triton")) == pytest.approx(norm / 2, rel=1e-5)


def test_tables_are_kept_in_bounds() -> None:
    launch_route.TABLES.clear()
    for _ in range(20):
        parameter = nn.Parameter(torch.zeros(5))
        parameter.grad = torch.randn(5)
        grad_norm([parameter], kernel="triton")
        grad_norm([torch.randn(9)], kernel="triton")
    assert len(launch_route.TABLES._by_content) <= pointer_table._KEPT_TABLES
    assert len(launch_route.TABLES._recent) <= pointer_table._KEPT_LISTS


def test_chunk_length_does_not_matter() -> None:
    gradient = torch.randn(300_003)
    rows = walker.gather_rows([gradient], False)
    assert rows is not None
    launcher = launch_route.launcher("triton")
    for words in (8192, 16_384, 65_536):
        table = pointer_table.build_table(rows, torch.device("cpu"), 0, words)
        norm = launcher.norm(table, pointer_table.L2, 1.0)
        assert float(norm) == pytest.approx(float(gradient.double().norm()), rel=1e-6)
        out, _ = launcher.stats(table)
        assert float(out[2, 0]) == float(out[2, 1]) == float(norm)
