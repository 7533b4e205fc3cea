"""matmul, mlp, bandwidth, launch: formulas by hand, series made up, and that they run small."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perfdoctor.bench import bandwidth, launch, matmul, memory, mlp, norm
from perfdoctor.bench.timing import benchmark
from perfdoctor.errors import UsageError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_operations_and_bytes_of_a_product() -> None:
    assert matmul.num_flops(1024) == 2_147_483_648
    assert matmul.bytes_moved(1024, 2) == 6_291_456  # three matrices of 2 MiB
    assert matmul.num_flops(2) == 16  # 2 x 2 results of 2 multiplications and, with the first onto 0, 2 additions


def test_a_graph_holds_so_many_products_that_its_replay_is_long() -> None:
    assert matmul.calls_a_graph(64) == matmul.calls_a_graph(1024) == 100
    assert matmul.calls_a_graph(2048) == 29  # 2 * 2048^3 is 17.2e9 operations: 29 of them are just below 500e9
    assert matmul.calls_a_graph(8192) == matmul.calls_a_graph(10**6) == 1


def test_the_cubic_law_starts_where_every_later_doubling_takes_eight_times_as_long() -> None:
    dims = [1024, 2048, 4096, 8192]
    assert matmul.cubic_onset(dims, [10.0, 28.0, 190.0, 1617.0]) == 2048  # exponents 1.49, 2.76, 3.09
    assert matmul.cubic_onset(dims, [1.0, 8.0, 64.0, 512.0]) == 1024
    assert matmul.cubic_onset(dims, [1.0, 8.0, 64.0, 128.0]) is None  # the last pair is not cubic
    assert matmul.cubic_onset(dims, [1.0, 8.0, 16.0, 128.0]) == 4096  # cubic before, but not all the way
    assert matmul.cubic_onset([64], [1.0]) is None


@given(st.integers(0, 6), st.integers(1, 5))
def test_a_flat_then_cubic_series_is_cut_at_its_bend(flat: int, cubic: int) -> None:
    dims = [2**i for i in range(flat + cubic + 1)]
    times = [8.0 ** max(0, i - flat) for i in range(len(dims))]
    assert matmul.cubic_onset(dims, times) == dims[flat]


def test_the_cpu_wins_up_to_the_first_dim_where_it_does_not() -> None:
    gpu = {64: 10.0, 128: 10.0, 256: 10.0, 512: 11.0}
    assert matmul.cpu_wins_until({64: 1.0, 128: 5.0, 256: 40.0}, gpu) == 128
    assert matmul.cpu_wins_until({64: 12.0, 128: 5.0}, gpu) is None
    assert matmul.cpu_wins_until({64: 1.0, 128: 2.0}, gpu) == 128


@pytest.mark.parametrize("dims", [[0], [-4, 64], []])
def test_dims_below_one_are_refused(dims: list[int]) -> None:
    with pytest.raises(UsageError, match="dim"):
        matmul.run_matmul("cpu", small=True, dims=dims)


def test_a_dim_that_does_not_fit_is_left_out_and_said() -> None:
    kept, notes = memory.fitting("matmul", [10, 100], lambda dim: dim * 1000, "cuda", free=50_000)
    assert kept == [10]
    assert notes == ["matmul 100 left out: it needs 100 kB, 50 kB are free on the GPU"]


def test_no_size_that_fits_is_an_error_with_the_figures() -> None:
    with pytest.raises(UsageError, match=r"not enough memory: matmul 10 left out: it needs 10 kB, 1 kB are free"):
        memory.fitting("matmul", [10], lambda dim: dim * 1000, "cpu", free=1000)
    with pytest.raises(UsageError, match="not enough memory"):
        matmul.run_matmul("cpu", small=True, dims=[10_000_000])  # 1.2 PB


def test_free_memory_of_the_cpu_is_below_what_the_machine_has() -> None:
    assert 0 < memory.free_bytes("cpu") < 1 << 50


def test_matmul_runs_small_and_puts_precision_back() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        result = matmul.run_matmul(DEVICE, small=True, dims=[64, 16, 16])
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    drawn = [row for row in result.rows if row.on_roofline and row.dtype == "float32"]
    assert [row.sizes["dim"] for row in drawn] == [16, 64]
    assert drawn[1].measurement.num_flops == 524_288
    assert drawn[1].measurement.bytes_moved == 49_152


def test_operations_of_an_mlp() -> None:
    # Two layers of width 4, batch 3: forward 2 products, weights' gradients 2, one layer's input gradient 1, each
    # 2 x 3 x 4 x 4 operations.
    assert mlp.num_flops(layers=2, steps=1, batch=3, width=4) == 5 * 96
    assert mlp.num_flops(layers=2, steps=7, batch=3, width=4) == 7 * 5 * 96


def test_how_a_time_grows_at_the_end() -> None:
    assert mlp.last_exponent([1, 2, 4], [5.0, 10.0, 40.0]) == 2.0
    assert mlp.last_exponent([16, 64], [3.0, 3.0]) == 0.0
    assert mlp.last_exponent([16], [3.0]) is None


def test_mlp_runs_along_every_axis() -> None:
    result = mlp.run_mlp(DEVICE, small=True)
    assert [row.measurement.name for row in result.rows if "width" in row.measurement.name] == [
        "mlp, width 32", "mlp, width 128", "mlp, width 512",
    ]  # fmt: skip
    assert set(result.facts) == {f"exponent_at_end_{axis}" for axis in ("layers", "steps", "batch", "width")}


def test_bytes_of_each_bandwidth_test() -> None:
    rows = bandwidth.run_bandwidth(DEVICE, small=True).rows
    found = {row.measurement.name: row for row in rows if row.measurement.name.startswith("memory")}
    size = found["memory read"].sizes["bytes"]
    assert size in bandwidth.SMALL_MEMORY_BYTES
    assert found["memory read"].measurement.bytes_moved == size
    assert found["memory copy"].measurement.bytes_moved == 2 * size  # read and written
    assert found["memory write"].measurement.bytes_moved == size
    assert found["memory read"].measurement.num_flops == size // 4  # one addition a float


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU only")
def test_without_a_gpu_the_rest_is_left_out_and_said() -> None:
    assert "no GPU here: L2, H2D and D2H are left out" in bandwidth.run_bandwidth("cpu", small=True).notes
    assert set(launch.run_launch("cpu", small=True).facts) == {"eager_back_to_back_us", "eager_waited_for_us"}


@pytest.mark.gpu
def test_bandwidths_of_a_gpu_are_in_a_sane_order() -> None:
    facts = bandwidth.run_bandwidth("cuda", small=False).facts
    rates = {name: float(value) for name, value in facts.items() if isinstance(value, float)}
    assert all(1e9 < rate < 1e14 for rate in rates.values())
    assert rates["l2_copy_bytes_per_s"] > rates["h2d_pinned_256_mib_bytes_per_s"]
    assert rates["memory_copy_bytes_per_s"] > rates["h2d_pinned_256_mib_bytes_per_s"]
    assert rates["h2d_pinned_256_mib_bytes_per_s"] > rates["h2d_pageable_256_mib_bytes_per_s"]
    assert rates["d2h_pinned_256_mib_bytes_per_s"] > rates["d2h_pageable_256_mib_bytes_per_s"]


@pytest.mark.gpu
def test_a_small_product_is_timed_without_its_launch() -> None:
    """The graph's time per product is below that of one product between two events, and still above nothing."""
    (row,) = [row for row in matmul.run_matmul("cuda", small=False, dims=[256]).rows if row.dtype == "bfloat16"]
    left, right = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    alone = benchmark("alone", lambda: left @ right)
    assert 500 < row.measurement.median_ns < alone.median_ns


@pytest.mark.gpu
def test_launches_are_timed_one_by_one_and_in_a_graph() -> None:
    facts = launch.run_launch("cuda", small=True).facts
    assert 0 < float(facts["graph_per_kernel_us"] or 0) < math.inf
    assert 0 < float(facts["eager_back_to_back_us"] or 0) < math.inf


def test_norm_is_wired() -> None:
    result = norm.run_norm(DEVICE, small=True)
    (row,) = [row for row in result.rows if row.measurement.name == "1000 x 1024 fp32: grad_norm | wall"]
    assert row.measurement.bytes_moved == 4_096_000
    assert row.measurement.num_flops == 2_048_000  # a multiplication and an addition an element
    assert not any(note.startswith("failed") for note in result.notes)
