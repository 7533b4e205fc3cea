"""The kernels on a GPU: Triton and CUDA C++, both against float64 and against torch."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from perfdoctor.kernels import launch_route, stats_table, walker
from perfdoctor.kernels.fused_clip import clip_in_optimizer
from perfdoctor.kernels.grad_stats import clip_grad_norm_, grad_norm, grad_stats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),  # torch says so when it is set
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KERNELS = ["triton", "cuda"]
SIZES = (1, 3, 8, 1000, 1024, 1025, 4097, 8192, 20_000, 33_001, 0, 300_003, 5_000_000)


@pytest.fixture(autouse=True)
def no_tables() -> Iterator[None]:
    yield
    stats_table.forget()
    launch_route.TABLES.clear()
    torch.cuda.set_sync_debug_mode("default")


def parameters_of(dtypes: list[torch.dtype], shift: int = 0, device: str = "cuda") -> list[nn.Parameter]:
    parameters = []
    for index, size in enumerate(SIZES):
        dtype = dtypes[index % len(dtypes)]
        parameter = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))
        parameter.grad = torch.randn(size + shift, device=device).to(dtype)[shift:]
        parameters.append(parameter)
    return parameters


def exact_norm(gradients: list[Tensor], norm_type: float = 2.0) -> float:
    """In float64, 2^27 elements at a time."""
    pieces = [piece for gradient in gradients for piece in torch.split(gradient.reshape(-1), 1 << 27)]
    if norm_type == math.inf:
        return max(float(piece.abs().max()) for piece in pieces if piece.numel())
    return math.sqrt(sum(float(piece.double().square().sum()) for piece in pieces))


def gradients_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtypes", [[dtype] for dtype in DTYPES] + [DTYPES])
@pytest.mark.parametrize("shift", [0, 1])
def test_norms(kernel: str, dtypes: list[torch.dtype], shift: int) -> None:
    parameters = parameters_of(dtypes, shift)
    for norm_type in (2.0, math.inf):
        norm = grad_norm(parameters, norm_type, kernel=kernel)
        assert norm.dtype == torch.float32
        assert float(norm) == pytest.approx(exact_norm(gradients_of(parameters), norm_type), rel=1e-6)
        for _ in range(5):
            assert torch.equal(norm, grad_norm(parameters, norm_type, kernel=kernel))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtypes", [[dtype] for dtype in DTYPES] + [DTYPES])
def test_stats(kernel: str, dtypes: list[torch.dtype]) -> None:
    parameters = parameters_of(dtypes, 1)
    parameters[3].grad[2] = math.nan  # type: ignore[index]
    parameters[9].grad[30_000] = -math.inf  # type: ignore[index]
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    found, expected = grad_stats(named, kernel=kernel), grad_stats(named, kernel="torch")
    for mine, other in ((found.per_tensor, expected.per_tensor), (found.total, expected.total)):
        for column in ("sum", "mean", "l2", "abs_max"):
            torch.testing.assert_close(
                getattr(mine, column), getattr(other, column), rtol=1e-5, atol=1e-2, equal_nan=True, msg=column
            )
        assert torch.equal(mine.num_nonfinite, other.num_nonfinite)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtypes", [[dtype] for dtype in DTYPES] + [DTYPES])
@pytest.mark.parametrize("shift", [0, 1])
def test_clip(kernel: str, dtypes: list[torch.dtype], shift: int) -> None:
    parameters = parameters_of(dtypes, shift)
    before = [gradient.clone() for gradient in gradients_of(parameters)]
    factor = 2.0 / (clip_grad_norm_(parameters, 2.0, kernel=kernel) + 1e-6)
    for gradient, old in zip(gradients_of(parameters), before, strict=True):
        torch.testing.assert_close(gradient, (old.float() * factor).to(old.dtype), rtol=0, atol=0)
        assert gradient._version > 0
    after = [gradient.clone() for gradient in gradients_of(parameters)]
    clip_grad_norm_(parameters, 1e9, kernel=kernel)
    assert all(torch.equal(gradient, old) for gradient, old in zip(gradients_of(parameters), after, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_nonfinite_as_torch(kernel: str, bad: float, norm_type: float) -> None:
    ours, theirs = parameters_of([torch.float32]), parameters_of([torch.float32])
    ours, theirs = ([p for p in parameters if p.numel()] for parameters in (ours, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        other.grad = mine.grad.clone()  # type: ignore[union-attr]
    for parameters in (ours, theirs):
        parameters[5].grad[7] = bad  # type: ignore[index]
    norm = clip_grad_norm_(ours, 1.0, norm_type, kernel=kernel)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type), equal_nan=True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, equal_nan=True)


def test_nothing_waits_for_the_device() -> None:
    parameters = parameters_of(DTYPES, 1)
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    grad_norm(parameters), clip_grad_norm_(parameters, 1.0), grad_stats(named)  # compile first
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        grad_norm(parameters)
        clip_grad_norm_(parameters, 1.0)
        clip_grad_norm_(parameters, 1.0, norm_type=1.0)
        grad_stats(named)
        for parameter in parameters:  # moved: a new table is uploaded
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()
    torch.cuda.set_sync_debug_mode("default")
    parameters[0].grad.fill_(math.inf)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)


def test_second_launch_is_prepared() -> None:
    if walker.compiled_walker() is None:
        pytest.skip("no C++ compiler")
    parameters = parameters_of([torch.float32])
    for _ in range(2):
        clip_grad_norm_(parameters, 1.0)
    found = launch_route.TABLES.find_recent(parameters, True)
    assert found is not None
    assert set(found.launches) == {("norm", 0), "scale"}


def test_second_statistics_are_prepared_and_the_same() -> None:
    if walker.compiled_walker() is None:
        pytest.skip("no C++ compiler")
    parameters = parameters_of(DTYPES, 1)
    parameters[4].grad = None
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)] + [("again", parameters[0])]
    results = [grad_stats(named) for _ in range(4)]
    found = stats_table.find(named, None)
    assert found is not None
    assert {"stats", "per_tensor"} <= set(found.table.launches)
    assert results[0].names == results[3].names == ("0", "1", "2", "3", *map(str, range(5, 13)), "again")
    for column in ("sum", "mean", "l2", "abs_max", "num_nonfinite"):
        for part in ("per_tensor", "total"):
            first, later = (getattr(getattr(result, part), column) for result in (results[0], results[3]))
            torch.testing.assert_close(later, first, rtol=0, atol=0, equal_nan=True)
    parameters[1].grad = parameters[1].grad * 3 + 1  # type: ignore[operator]
    moved, expected = grad_stats(named), grad_stats(named, kernel="torch")
    torch.testing.assert_close(moved.per_tensor.l2, expected.per_tensor.l2, rtol=1e-6, atol=0)


def test_statistics_from_two_threads_and_in_inference_mode() -> None:
    parameters = parameters_of([torch.float32])
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    with torch.inference_mode():
        clip_grad_norm_(parameters, 1e9), grad_stats(named)  # the tables are made here, and outlive the mode
    expected = exact_norm(gradients_of(parameters))
    wrong: list[float] = []

    def work(max_norm: float) -> None:
        for _ in range(100):
            norm = grad_stats(named).total.l2 if max_norm < 0 else clip_grad_norm_(parameters, max_norm)
            if float(norm) != pytest.approx(expected, rel=1e-6):
                wrong.append(float(norm))

    # Norms that clip nothing, beside `grad_norm`s whose own coefficient would: it must not reach the scaling.
    threads = [threading.Thread(target=work, args=(limit,)) for limit in (1e9, -1.0, 1e12)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        grad_norm(parameters)
    for thread in threads:
        thread.join()
    assert wrong == []
    launch_route.TABLES.clear()
    assert float(grad_norm(parameters)) == pytest.approx(expected, rel=1e-6)


def test_tables_go_with_their_graphs() -> None:
    compiled = walker.compiled_walker()
    if compiled is None:
        pytest.skip("no C++ compiler")
    parameters = parameters_of([torch.float32])
    grad_norm(parameters)
    captured = launch_route.TABLES._captured
    before = len(captured)
    for _ in range(8):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            norms = [grad_norm(parameters) for _ in range(5)]
        graph.replay()
        assert float(norms[4]) == pytest.approx(exact_norm(gradients_of(parameters)), rel=1e-6)
        del graph, norms
        gc.collect()
        torch.cuda.synchronize()
        time.sleep(0.05)  # the driver tells of a graph's end from a thread of its own
    assert len(captured) <= before + 4


@pytest.mark.parametrize("kernel", KERNELS)
def test_infinite_max_norm_only_measures(kernel: str) -> None:
    parameters = parameters_of([torch.float32])
    before = [gradient.clone() for gradient in gradients_of(parameters)]
    for _ in range(3):
        norm = clip_grad_norm_(parameters, math.inf, kernel=kernel)
        assert float(norm) == pytest.approx(exact_norm(before), rel=1e-6)
    assert all(torch.equal(now, old) for now, old in zip(gradients_of(parameters), before, strict=True))


def test_a_stale_table_cannot_be_had() -> None:
    """Every step frees, moves, swaps, resizes and overwrites gradients; the allocator hands old addresses out again."""
    parameters = [nn.Parameter(torch.zeros(600, device="cuda")) for _ in range(60)]
    generator = torch.Generator().manual_seed(1)
    for step in range(60):
        for index, parameter in enumerate(parameters):
            choice = int(torch.randint(0, 6, (), generator=generator))
            if choice == 0:
                parameter.grad = None
            elif choice == 1:
                parameter.grad = torch.randn(600, device="cuda")
            elif choice == 2 and parameter.grad is not None:
                parameter.grad.mul_(1.5)
            elif choice == 3 and parameter.grad is not None:
                parameter.grad.data = torch.randn(600, device="cuda")
            elif choice == 4:
                parameter.grad = torch.randn(700, device="cuda")[index : index + 600]
        if step % 10 == 9:
            for parameter in parameters:
                parameter.grad = None
            torch.cuda.empty_cache()  # the old addresses are no memory at all now
        gradients = gradients_of(parameters)
        expected = exact_norm(gradients) if gradients else 0.0
        assert float(grad_norm(parameters)) == pytest.approx(expected, rel=1e-6), step


def test_many_tensors_and_one_huge_one() -> None:
    gradients = [torch.randn(30, device="cuda") for _ in range(4000)] + [torch.randn(50_000_000, device="cuda")]
    for kernel in KERNELS:
        assert float(grad_norm(gradients, kernel=kernel)) == pytest.approx(exact_norm(gradients), rel=1e-6)


def test_more_than_2_31_elements() -> None:
    gradient = torch.randn((1 << 31) + 12_345, dtype=torch.bfloat16, device="cuda")
    gradient[-1] = 1000.0  # the last element counts
    expected = exact_norm([gradient])
    for kernel in KERNELS:
        assert float(grad_norm([gradient], kernel=kernel)) == pytest.approx(expected, rel=1e-6)
        assert float(grad_norm([gradient], math.inf, kernel=kernel)) == 1000.0
    for _ in range(2):  # the second launch is prepared: its number of elements takes eight bytes
        stats = grad_stats({"huge": gradient})
        assert float(stats.total.l2) == pytest.approx(expected, rel=1e-6)
        assert float(stats.per_tensor.l2[0]) == pytest.approx(expected, rel=1e-6)


def test_equal_values_where_plain_addition_drifts() -> None:
    for value in (0.1, 0.3337, 1e-3):
        gradients = [torch.full((100_000_007,), value, device="cuda")]
        for kernel in KERNELS:
            assert float(grad_norm(gradients, kernel=kernel)) == pytest.approx(exact_norm(gradients), rel=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_in_a_cuda_graph(kernel: str) -> None:
    parameters = parameters_of([torch.float32, torch.bfloat16], 1)
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        clip_grad_norm_(parameters, 1e9, kernel=kernel), grad_stats(named, kernel=kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = clip_grad_norm_(parameters, 1.0, kernel=kernel)
        stats = grad_stats(named, kernel=kernel)
    for scale in (3.0, 0.5, 100.0):
        for gradient in gradients_of(parameters):
            gradient.copy_(torch.randn_like(gradient) * scale)
        expected = exact_norm(gradients_of(parameters))
        graph.replay()
        # An eager call on other gradients must not disturb what the graph replays.
        grad_norm([torch.randn(1000, device="cuda") for _ in range(20)], kernel=kernel)
        launch_route.TABLES.clear()
        assert float(norm) == pytest.approx(expected, rel=1e-6)
        assert float(stats.total.l2) == pytest.approx(min(1.0, expected), rel=1e-2)


def test_on_two_streams_at_once() -> None:
    parameters = [parameters_of([torch.float32]) for _ in range(2)]
    expected = [exact_norm(gradients_of(each)) for each in parameters]
    grad_norm(parameters[0])  # Triton compiles here, not in two threads
    torch.cuda.synchronize()
    norms: list[list[Tensor]] = [[], []]

    def work(which: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                norms[which].append(grad_norm(parameters[which]))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which in range(2):
        assert len(norms[which]) == 50
        assert all(float(norm) == pytest.approx(expected[which], rel=1e-6) for norm in norms[which])


def test_odd_gradients_and_mixed_devices() -> None:
    table = torch.randn(640, 66, device="cuda")
    odd = [table[:, ::2], table.t(), table[3:5, 1:], torch.zeros(2, device="cuda").expand(5, 2), torch.randn(4)]
    exact = math.sqrt(sum(float(view.double().square().sum()) for view in odd))
    assert float(grad_norm(odd)) == pytest.approx(exact, rel=1e-6)
    double = [torch.ones(3, device="cuda"), torch.ones(4, dtype=torch.float64, device="cuda")]
    assert float(grad_norm(double)) == pytest.approx(math.sqrt(7), rel=1e-6)
    parameter = nn.Parameter(torch.zeros(30, 20, device="cuda"))
    parameter.grad = torch.randn(30, 40, device="cuda")[:, ::2]
    clip_grad_norm_([parameter], 1.0)
    assert float(parameter.grad.double().norm()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.filterwarnings("ignore")  # inductor warns of its own: TF32, fork
def test_compiled_in_one_graph() -> None:
    parameters = parameters_of([torch.float32])
    expected = exact_norm(gradients_of(parameters))
    torch._dynamo.reset()
    compiled = torch.compile(lambda: clip_grad_norm_(parameters, 1.0) * 1.0, fullgraph=True)
    assert float(compiled()) == pytest.approx(expected, rel=1e-6)
    assert exact_norm(gradients_of(parameters)) == pytest.approx(1.0, rel=1e-4)


def test_clip_inside_a_fused_optimizer() -> None:
    results = []
    for fused_clip in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 64, device="cuda")).square().sum().backward()
            if fused_clip:
                clip_in_optimizer(optimizer, 0.1)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        results.append(model.weight.detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_in_one_call() -> None:
    gradients = [torch.randn(1000, device=f"cuda:{index % 2}") for index in range(10)]
    exact = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    norm = grad_norm(gradients)
    assert norm.device == gradients[0].device
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    for index in (1, 0):  # the device that is not the current one, too
        assert float(grad_norm(gradients[index::2])) == pytest.approx(exact_norm(gradients[index::2]), rel=1e-6)
        assert float(grad_norm(gradients[index::2])) == pytest.approx(exact_norm(gradients[index::2]), rel=1e-6)
