"""The public functions on CPU tensors, against float64 and against torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from perfdoctor.errors import UsageError
from perfdoctor.kernels.grad_stats import clip_grad_norm_, grad_norm, grad_stats

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1,), (7,), (64, 3), (512,), (513,), (100, 101), (70_001,), (0,), ()]


def parameters_with(gradients: list[Tensor | None]) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        like = torch.zeros(3) if gradient is None else torch.zeros_like(gradient)
        parameter = nn.Parameter(like)
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def random_gradients(dtypes: list[torch.dtype], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator).to(dtypes[index % len(dtypes)]) for index, shape in enumerate(SHAPES)
    ]


def exact_norm(gradients: list[Tensor], norm_type: float = 2.0) -> float:
    flat = torch.cat([gradient.double().reshape(-1) for gradient in gradients])
    return float(torch.linalg.vector_norm(flat, norm_type))


@pytest.mark.parametrize("dtypes", [[dtype] for dtype in DTYPES] + [DTYPES])
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0, 3.0])
def test_norm_against_float64(dtypes: list[torch.dtype], norm_type: float) -> None:
    gradients = random_gradients(dtypes)
    norm = grad_norm(parameters_with([*gradients, None]), norm_type)
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    assert float(norm) == pytest.approx(
        exact_norm(gradients, norm_type), rel=1e-6 if norm_type in (2, math.inf) else 1e-3
    )
    assert torch.equal(norm, grad_norm(gradients, norm_type))  # gradients themselves, and the same bits again


def test_norm_of_equal_values_where_plain_addition_drifts() -> None:
    gradient = torch.full((3_000_001,), 0.1)
    assert float(grad_norm([gradient])) == pytest.approx(0.1 * math.sqrt(3_000_001), rel=1e-6)


def test_float64_keeps_its_digits() -> None:
    norm = grad_norm([torch.full((9,), 1 / 3, dtype=torch.float64)])
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(1.0, rel=1e-15)


def test_nothing_to_read() -> None:
    for nothing in ([], [torch.zeros(0)], parameters_with([None, None]), iter(())):
        assert float(grad_norm(nothing)) == 0.0
    assert float(clip_grad_norm_(parameters_with([None]), 1.0)) == 0.0
    assert float(grad_norm(torch.tensor([3.0, 4.0]))) == 5.0  # a single tensor


def test_views_and_strides() -> None:
    table = torch.arange(24.0).reshape(4, 6)
    views = [table.t(), table[1:, ::2], table[:, 3], table.flip(0), torch.ones(1).expand(4), table[2]]
    assert float(grad_norm(views)) == pytest.approx(exact_norm(views), rel=1e-6)


def test_parameter_listed_twice_counts_once() -> None:
    (parameter,) = parameters_with([torch.tensor([3.0, 4.0])])
    assert float(grad_norm([parameter, parameter])) == 5.0
    assert float(clip_grad_norm_([parameter, parameter], 1.0)) == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


def test_the_memory_of_a_gradient_counts_once_however_it_is_viewed() -> None:
    """As in the kernels' table, which knows addresses: the results must not hang on where the tensors lie."""
    memory = torch.ones(4)
    parameters = parameters_with([memory, memory.view(2, 2), memory[:]])
    assert float(grad_norm(parameters)) == 2.0
    assert float(grad_stats([(str(number), each) for number, each in enumerate(parameters)]).total.l2) == 2.0
    assert float(clip_grad_norm_(parameters, 1.0)) == 2.0
    torch.testing.assert_close(memory, torch.full((4,), 0.5))
    wide = torch.ones(8)  # the same address and number of elements, other elements
    assert float(grad_norm(parameters_with([wide[:4], wide[::2]]))) == pytest.approx(math.sqrt(8))
    assert float(grad_norm([memory, memory])) == pytest.approx(math.sqrt(2))  # gradients themselves: as often as given


@pytest.mark.parametrize("norm_type", [0.0, 0.5, 1.0, 3.0, -1.0, math.inf, -math.inf, math.nan])
def test_orders_over_mixed_types_as_torch(norm_type: float) -> None:
    gradients = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, -2.0]), torch.tensor([4.0], dtype=torch.float64)]
    expected = torch.nn.utils.get_total_norm(gradients, norm_type)
    torch.testing.assert_close(grad_norm(gradients, norm_type), expected, rtol=1e-6, atol=0, equal_nan=True)


def test_complex_gradients_have_a_norm_and_no_statistics() -> None:
    gradient = torch.tensor([3.0 + 4.0j, -12.0j])
    assert float(grad_norm([gradient])) == pytest.approx(13.0)
    assert float(grad_norm([gradient], math.inf)) == pytest.approx(12.0)
    with pytest.raises(UsageError, match=r"complex.*view_as_real"):
        grad_stats([("a", torch.ones(2)), ("b", gradient)])
    assert float(grad_stats([("a", torch.view_as_real(gradient))]).total.l2) == pytest.approx(13.0)


@pytest.mark.parametrize("dtypes", [[dtype] for dtype in DTYPES] + [DTYPES])
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_clip_as_torch(dtypes: list[torch.dtype], norm_type: float, max_norm: float) -> None:
    gradients = [gradient for gradient in random_gradients(dtypes) if gradient.numel()]  # torch's inf norm needs some
    ours, theirs = (parameters_with([*(gradient.clone() for gradient in gradients), None]) for _ in range(2))
    versions = [parameter.grad._version for parameter in ours if parameter.grad is not None]
    norm = clip_grad_norm_(ours, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    torch.testing.assert_close(norm, expected.float(), rtol=1e-2, atol=0)  # torch rounds to the gradients' type
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=2e-2, atol=1e-6)
    assert all(parameter.grad._version > before for parameter, before in zip(ours, versions, strict=False))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clip_of_nonfinite_gradients_as_torch(bad: float, norm_type: float) -> None:
    gradients = [torch.tensor([1.0, bad, -2.0]), torch.tensor([3.0])]
    ours, theirs = (parameters_with([gradient.clone() for gradient in gradients]) for _ in range(2))
    norm = clip_grad_norm_(ours, 1.0, norm_type)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type), equal_nan=True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, equal_nan=True)


def test_error_if_nonfinite_comes_before_any_change() -> None:
    parameters = parameters_with([torch.tensor([1.0, math.inf])])
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert torch.equal(parameters[0].grad, torch.tensor([1.0, math.inf]))
    assert float(clip_grad_norm_(parameters_with([torch.ones(4)]), 1.0, error_if_nonfinite=True)) == 2.0


def test_clip_takes_only_gradients_of_its_items() -> None:
    plain = torch.tensor([3.0, 4.0])  # no parameter and no .grad: torch leaves it alone, and so do we
    assert float(clip_grad_norm_([plain], 1.0, foreach=True)) == 0.0
    assert plain.tolist() == [3.0, 4.0]


def test_clip_in_inference_mode_and_of_generators() -> None:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.inference_mode():
        assert float(clip_grad_norm_(model.parameters(), 1.0)) == pytest.approx(math.sqrt(6), rel=1e-6)
    assert float(grad_norm(model.parameters())) == pytest.approx(1.0, rel=1e-5)


def test_sparse_and_wrong_things_are_named() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    for call in (grad_norm, lambda items: clip_grad_norm_(items, 1.0)):
        with pytest.raises(UsageError, match="sparse=False"):
            call(list(embedding.parameters()))
    with pytest.raises(UsageError, match="item 1 is a str"):
        grad_norm([torch.ones(1), "weight"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="kernel='cudnn'"):
        grad_norm([torch.ones(1)], kernel="cudnn")
    with pytest.raises(UsageError, match="cannot read cpu"):
        grad_norm([torch.ones(1)], kernel="cuda")
    for named in ([torch.ones(1)], None, 3):
        with pytest.raises(UsageError, match=r"named_parameters\(\)"):
            grad_stats(named)  # type: ignore[arg-type]
    for call in (grad_norm, lambda items: clip_grad_norm_(items, 1.0)):
        for items in (nn.Linear(1, 1), None, 3):
            with pytest.raises(UsageError, match=r"got a \w+: pass list\(model.parameters\(\)\)"):
                call(items)


def test_stats_worked_out_by_hand() -> None:
    tied = nn.Parameter(torch.zeros(2))
    tied.grad = torch.tensor([3.0, -4.0])
    other = nn.Parameter(torch.zeros(4))
    other.grad = torch.tensor([1.0, math.inf, -math.inf, 2.0])
    unused = nn.Parameter(torch.zeros(1))
    empty = torch.zeros(0)
    stats = grad_stats([("a", tied), ("b", other), ("c", unused), ("d", tied), ("e", empty)])
    assert stats.names == ("a", "b", "d", "e")
    assert stats.per_tensor.sum.tolist()[0::2] == [-1.0, -1.0]
    assert stats.per_tensor.mean.tolist()[0] == -0.5
    assert math.isnan(stats.per_tensor.mean.tolist()[3])
    assert stats.per_tensor.l2.tolist() == [5.0, math.inf, 5.0, 0.0]
    assert stats.per_tensor.abs_max.tolist() == [4.0, math.inf, 4.0, 0.0]
    assert stats.per_tensor.num_nonfinite.tolist() == [0, 2, 0, 0]
    assert int(stats.total.num_nonfinite) == 2
    assert math.isnan(float(stats.total.sum))  # inf - inf
    assert float(stats.total.l2) == math.inf
    tied_only = grad_stats({"a": tied, "b": tied})
    assert float(tied_only.total.l2) == 5.0  # once, under whatever names


def test_stats_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    assert grad_stats(model).names == ()
    model(torch.ones(2, 3)).sum().backward()
    stats = grad_stats(model)
    assert stats.names == ("0.weight", "0.bias", "1.weight", "1.bias")
    expected = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(stats.per_tensor.l2, torch.stack(expected))
    torch.testing.assert_close(stats.total.l2, grad_norm(model.parameters()))
