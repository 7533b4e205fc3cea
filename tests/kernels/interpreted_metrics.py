"""The metric kernels on CPU tensors. Run by test_triton_kernels.py in a process where TRITON_INTERPRET=1 is set."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from perfdoctor.errors import NonFiniteError
from perfdoctor.kernels import metrics_reference, pointer_table, stats_table
from perfdoctor.kernels.finite_launch import Checks
from perfdoctor.kernels.metrics_launch import READABLE, Launcher
from perfdoctor.treat.device_metrics import DeviceMetrics
from perfdoctor.treat.nonfinite import NonFiniteWatch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about the NaN that are meant
CPU = torch.device("cpu")


def states() -> list[tuple[Launcher, Tensor, Tensor]]:
    made = []
    for kernel in ("triton", "torch"):
        state = metrics_reference.new_state(CPU, 0.9)
        made.append((Launcher(state, kernel), state, torch.full_like(state, -1.0)))
    return made


@pytest.mark.parametrize("count", [1, 2, 7, 15, 16, 17, 33, 63])
def test_as_the_reference(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    both = states()
    rows = torch.randperm(63, generator=generator)[:count].tolist()
    for step in range(4):
        numbers = torch.randn(count, generator=generator, dtype=torch.float64) * 100
        values: list[Tensor | float] = [
            numbers[index].to(READABLE[index % len(READABLE)]) if index % 3 else float(numbers[index])
            for index in range(count)
        ]
        weight = 1.5 * step if step % 2 else torch.tensor(step)
        for launcher, state, snapshot in both:
            launcher.accumulate(snapshot, rows, values, weight)
            assert torch.equal(snapshot, state)
    torch.testing.assert_close(both[0][1], both[1][1], rtol=1e-14, atol=0)


def test_values_that_are_hard_to_pass() -> None:
    values = [0.0, -0.0, 1.0, 2.0, math.inf, -math.inf, math.nan, -math.nan, 5e-324, 1.8e308, 2.3e-308, -1e-300, 0.1]
    values.append(float.fromhex("0x1.fffffffffffffp+1023"))
    both = states()
    for launcher, _, snapshot in both:
        launcher.accumulate(snapshot, list(range(len(values))), values, 1)
    last = both[0][1][: len(values), metrics_reference.LAST].tolist()
    for got, value in zip(last, values, strict=True):
        assert (math.isnan(got) and math.isnan(value)) or got == (value if abs(value) >= 2.3e-308 else 0)
    torch.testing.assert_close(both[0][1], both[1][1], rtol=1e-12, atol=1e-300, equal_nan=True)


def test_nan_stays_in_the_extremes() -> None:
    for launcher, state, snapshot in states():
        for value in (1.0, math.nan, 2.0):
            launcher.accumulate(snapshot, [4], [torch.tensor(value)], 1.0)
        assert state[4, metrics_reference.MIN].isnan()
        assert state[4, metrics_reference.MAX].isnan()
        assert float(state[4, metrics_reference.LAST]) == 2


def test_views_that_cannot_be_read_in_place() -> None:
    negated = torch._neg_view(torch.tensor(3.0))
    odd = torch.arange(12.0).view(3, 4)[1, 2]
    for launcher, state, snapshot in states():
        launcher.accumulate(snapshot, [0, 1, 2], [negated, odd, torch.tensor(2.0).to(torch.float8_e5m2)], 1.0)
        assert state[:3, metrics_reference.SUM].tolist() == [-3, 6, 2]


def test_metrics_by_the_kernel() -> None:
    metrics = DeviceMetrics(kernel="triton", every=2)
    for value in (1.0, 2.0, 9.0):
        metrics.update(loss=torch.tensor(value).bfloat16(), rate=value / 10, weight=value)
    assert metrics.latest() == {"loss": 2.0, "rate": 0.2}
    assert metrics.read().statistics["loss"].mean == (1 + 4 + 81) / 12


COUNTS = ([], [0] * 300, [0, 0, 3, 0, 5, *[0] * 600, 1], [7], [0] * 256 + [2])


@pytest.mark.parametrize("counts", COUNTS, ids=len)
@pytest.mark.parametrize("loss", [None, 1.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("excuse", "is_scale"), [(None, False), (0.0, False), (1.0, False), (2.0, True), (0.5, True)])
def test_nonfinite(counts: list[int], loss: float | None, excuse: float | None, is_scale: bool) -> None:
    here = torch.tensor(counts, dtype=torch.int64)
    results = []
    for kernel in ("triton", "torch"):
        record, found = torch.zeros(8, dtype=torch.int64), torch.zeros(())
        launcher = Launcher(record, kernel)
        for check in (5, 6):
            launcher.note_nonfinite(
                found,
                None if loss is None else torch.tensor(loss),
                None if excuse is None else torch.tensor(excuse),
                is_scale,
                here,
                check,
            )
        snapshot = torch.full_like(record, -1)
        results.append((record.tolist(), float(found)))
        launcher.take(snapshot, found)
        assert snapshot.tolist() == results[-1][0]
        assert not record.any()
        assert not found.any()
    assert results[0] == results[1]
    excused = excuse in (1.0, 2.0)
    bad_loss = loss is not None and not math.isfinite(loss)
    bad = bad_loss or (any(counts) and not excused)
    record, found = results[0]
    assert (record[0], found) == ((2, 1.0) if bad else (0, 0.0))
    assert record[6] == 2 * (excused and any(counts))
    if bad:
        first = next((index for index, count in enumerate(counts) if count), None)
        assert record[1:4] == ([5, -1, 1] if bad_loss else [5, first, counts[first or 0]])
        assert record[4:6] == [sum(count > 0 for count in counts), sum(counts)]


def test_a_watch_by_the_kernels() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    watch = NonFiniteWatch(model, kernel="triton")
    for bad in (False, True):
        model(torch.ones(2, 3)).sum().backward()
        if bad:
            model[1].weight.grad[0, 2] = math.nan  # type: ignore[index]
        watch.check(torch.tensor(1.0))
        if not bad:
            watch.step()
    with pytest.raises(NonFiniteError, match=r"step 2: the gradient of 1\.weight: 1 value is not finite"):
        watch.step()


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 7, 1024, 1025, 0, 9000, 3, 64, 5)


def gradients_of(dtypes: tuple[torch.dtype, ...], bad: dict[int, int], value: float) -> list[tuple[str, Tensor]]:
    """Named gradients; `bad`: how many values of each, from its end, are not finite. Some start off 16 bytes."""
    pairs = []
    for index, size in enumerate(SIZES):
        whole = torch.full((size + 1,), 0.5, dtype=dtypes[index % len(dtypes)])
        gradient = whole[index % 2 :][:size]
        if index in bad:
            gradient[size - bad[index] :] = value
        pairs.append((f"p{index}", gradient))
    return pairs


@pytest.mark.parametrize("dtypes", [DTYPES[:1], DTYPES[1:2], DTYPES], ids=str)
@pytest.mark.parametrize("bad", [{}, {6: 3, 3: 1024, 5: 9000, 1: 1}, {8: 5}], ids=str)
@pytest.mark.parametrize("loss", [None, math.nan])
def test_gradients_and_loss_in_one_launch(dtypes: tuple[torch.dtype, ...], bad: dict[int, int],
                                          loss: float | None) -> None:  # fmt: skip
    pairs = gradients_of(dtypes, bad, math.nan if len(bad) % 2 else -math.inf)
    here = None if loss is None else torch.tensor(loss).bfloat16()
    record, found = torch.zeros(8, dtype=torch.int64), torch.zeros(())
    checks = Checks(record, found, "triton")
    table = checks.find(pairs)
    assert table is not None
    for number in (3, 4):
        checks.run(table, pairs, here, None, False, number)
        assert not pointer_table.zero_counts(table.table).any()
        assert not table.table.counter.any()
    is_bad_loss = loss is not None and not math.isfinite(loss)
    first = min(bad, default=0)
    assert record[0] == 2 * (is_bad_loss or bool(bad))
    assert float(found) == (record[0] > 0)
    if record[0]:
        assert record[1:4].tolist() == ([3, -1, 1] if is_bad_loss else [3, first, bad[first]])
        assert record[4:6].tolist() == [len(bad), sum(bad.values())]
    stats_table.forget()


@pytest.mark.parametrize(
    ("excuse", "is_scale", "counts"), [(1.0, False, 0), (0.0, False, 1), (2.0, True, 0), (0.5, True, 1)]
)
def test_excused_gradients(excuse: float, is_scale: bool, counts: int) -> None:
    pairs = gradients_of(DTYPES, {2: 1}, math.inf)
    record, found = torch.zeros(8, dtype=torch.int64), torch.zeros(())
    checks = Checks(record, found, "triton")
    table = checks.find(pairs)
    assert table is not None
    checks.run(table, pairs, torch.zeros(()), torch.tensor(excuse), is_scale, 0)
    assert (record[0], record[6], float(found)) == (counts, 1 - counts, counts)
    snapshot = torch.full_like(record, -1)
    checks.take(snapshot)
    assert snapshot[0] == counts
    assert not record.any()
    stats_table.forget()


def test_a_gradient_under_two_names_is_not_for_one_launch() -> None:
    gradient = torch.ones(5)
    checks = Checks(torch.zeros(8, dtype=torch.int64), torch.zeros(()), "triton")
    assert checks.find([("a", gradient), ("b", gradient)]) is None
    stats_table.forget()
