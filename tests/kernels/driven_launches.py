"""The compiled launches on a stand-in driver. Run by test_driver_launch.py with its path in DRIVER_STAND_IN."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perfdoctor.kernels import kernel_launch, walker
from perfdoctor.kernels.finite_launch import Checks
from perfdoctor.kernels.metrics_launch import bits_of

DRIVER = ctypes.CDLL(os.environ["DRIVER_STAND_IN"], ctypes.RTLD_GLOBAL)  # before the walker looks for libcuda.so.1
STREAM = 77


@pytest.fixture
def module() -> Any:
    compiled = walker.compiled_walker()
    if compiled is None:
        pytest.skip("no C++ compiler")
    for name in ("num_launches", "capture_status", "query_code", "num_queries"):
        number(name).value = 0
    return compiled


def number(name: str) -> ctypes.c_int64:
    return ctypes.c_int64.in_dll(DRIVER, name)


def words(count: int) -> list[int]:
    return list((ctypes.c_int64 * 32).in_dll(DRIVER, "words"))[:count]


KEPT: list[Any] = []


def launch_of(module: Any, arguments: Sequence[int], sizes: Sequence[int] | None = None) -> Any:
    sizes = list(sizes or [8] * len(arguments))
    function = (ctypes.c_int64 * (1 + len(sizes)))(len(sizes), *sizes)
    KEPT.append(function)
    return module.Launch(ctypes.addressof(function), 1, 32, 0, list(arguments), sizes)


def test_scalars_are_read_where_they_lie_now(module: Any) -> None:
    launch = launch_of(module, [11, 0, 0, 0, 0, 0, 99])
    examples = [1.0, torch.zeros(1, dtype=torch.bfloat16), 3, torch.zeros((), dtype=torch.int64)]
    scalars = module.ScalarLaunch(launch, -1, examples)
    loss, count = torch.ones(1, dtype=torch.bfloat16, requires_grad=True), torch.arange(5)[3]
    for weight, rate in ((2.0, 7), (True, math.inf), (0, -1e-320), (5, math.nan)):
        assert scalars.run(STREAM, 55, weight, {"loss": loss, "rate": rate, "count": count})
        expected = [11, 55, bits_of(weight), loss.data_ptr(), bits_of(rate), count.data_ptr(), 99]
        assert words(7) == expected
    assert number("launched_on").value == STREAM
    assert number("num_launches").value == 4


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    ("loss", "rate", "weight"),
    [
        (torch.ones(2, dtype=torch.bfloat16), 7, 2.0),
        (torch.ones(1), 7, 2.0),
        (torch._neg_view(torch.ones(1, dtype=torch.bfloat16)), 7, 2.0),
        (torch.ones(1, dtype=torch.bfloat16, device="meta"), 7, 2.0),
        (torch._efficientzerotensor((1,), dtype=torch.bfloat16), 7, 2.0),
        (torch.ones(1, dtype=torch.bfloat16).as_subclass(Subclass), 7, 2.0),
        (torch.ones(1, dtype=torch.bfloat16).to_sparse(), 7, 2.0),
        (1.0, 7, 2.0),
        (torch.ones(1, dtype=torch.bfloat16), "7", 2.0),
        (torch.ones(1, dtype=torch.bfloat16), 10**400, 2.0),
        (torch.ones(1, dtype=torch.bfloat16), torch.ones(()), 2.0),
        (torch.ones(1, dtype=torch.bfloat16), 7, -2.0),
        (torch.ones(1, dtype=torch.bfloat16), 7, math.inf),
        (torch.ones(1, dtype=torch.bfloat16), 7, math.nan),
        (torch.ones(1, dtype=torch.bfloat16), 7, None),
        (torch.ones(1, dtype=torch.bfloat16), 7, torch.ones(())),
    ],
)
def test_other_scalars_are_left_to_python(module: Any, loss: Any, rate: Any, weight: Any) -> None:
    scalars = module.ScalarLaunch(launch_of(module, [0] * 5), -1, [1.0, torch.zeros((), dtype=torch.bfloat16), 0.5])
    assert not scalars.run(STREAM, 55, weight, {"loss": loss, "rate": rate})
    assert not scalars.run(STREAM, 55, 1.0, {"loss": torch.ones(1, dtype=torch.bfloat16)})  # one too few
    assert number("num_launches").value == 0


def test_another_device_is_left_to_python(module: Any) -> None:
    scalars = module.ScalarLaunch(launch_of(module, [0] * 4), 1, [1.0, torch.zeros(())])
    assert not scalars.run(STREAM, 55, 1.0, {"loss": torch.zeros(())})


def test_nothing_is_launched_in_a_graph_capture(module: Any) -> None:
    scalars = module.ScalarLaunch(launch_of(module, [0] * 4), -1, [1.0, torch.zeros(())])
    checks = module.CheckLaunch(launch_of(module, [0] * 4), 1, -1, torch.zeros(()), None, None, ())
    for status, launched in ((1, 0), (2, 0), (0, 2)):
        number("capture_status").value = status
        assert scalars.run(STREAM, 55, 1.0, {"loss": torch.zeros(())}) is (status == 0)
        assert checks.run(STREAM, [], torch.zeros(()), None, 3) is (status == 0)
        assert number("num_launches").value == launched


def pairs_with_gradients() -> list[tuple[str, Tensor]]:
    pairs: list[tuple[str, Tensor]] = []
    for index in range(40):
        parameter = nn.Parameter(torch.zeros(index + 1))
        parameter.grad = torch.ones(index + 1) if index % 5 else None
        pairs.append((f"p{index}", parameter))
    return pairs


def checked(module: Any, pairs: list[tuple[str, Tensor]], loss: Any, excuse: Any) -> Any:
    walk = walker.walk_of(module.gather([item for _, item in pairs], False))
    launch = launch_of(module, [1, 2, 3, 4, 5, 6], [8, 8, 8, 4, 4, 8])
    return module.CheckLaunch(launch, 1, -1, loss, excuse, walk, tuple(name for name, _ in pairs))


def test_a_check_is_launched_where_all_gradients_lie_as_they_did(module: Any) -> None:
    pairs, loss, scale = pairs_with_gradients(), torch.ones(()), torch.ones(1)
    check = checked(module, pairs, loss, scale)
    other = torch.full((), 2.0)
    assert check.run(STREAM, pairs, other, scale, 12)
    assert words(3) == [1, other.data_ptr(), scale.data_ptr()]
    assert words(4)[3] & 0xFFFFFFFF == 12
    assert not check.run(STREAM, pairs, other, None, 12)
    assert not check.run(STREAM, pairs, 2.0, scale, 12)
    assert not check.run(STREAM, pairs, other.double(), scale, 12)
    assert not check.run(STREAM, pairs[:-1], other, scale, 12)
    assert not check.run(STREAM, [], other, scale, 12)
    assert number("num_launches").value == 1


def test_without_a_loss_its_argument_stays(module: Any) -> None:
    pairs = pairs_with_gradients()
    check = checked(module, pairs, None, None)
    assert check.run(STREAM, pairs, None, None, 9)
    assert words(3) == [1, 2, 3]
    assert not check.run(STREAM, pairs, torch.ones(()), None, 9)


@pytest.mark.parametrize("index", [1, 17, 39])
def test_a_gradient_that_has_moved_is_found_before_the_launch(module: Any, index: int) -> None:
    pairs = pairs_with_gradients()
    check = checked(module, pairs, None, None)
    parameter = pairs[index][1]
    before = parameter.grad
    assert before is not None
    for change in (None, before.clone(), before.clone().as_subclass(Subclass)):
        parameter.grad = change
        assert not check.run(STREAM, pairs, None, None, 1)
    pairs[0][1].grad = torch.ones(1)  # there was none
    parameter.grad = before
    assert not check.run(STREAM, pairs, None, None, 1)
    pairs[0][1].grad = None
    assert check.run(STREAM, pairs, None, None, 1)
    before.data = before.clone()  # the same object in other memory
    assert not check.run(STREAM, pairs, None, None, 1)
    assert number("num_launches").value == 1


def test_an_event_is_not_asked_in_a_graph_capture(module: Any) -> None:
    number("capture_status").value = 1
    assert not module.has_come(STREAM, 5)
    assert number("num_queries").value == 0
    number("capture_status").value = 0
    assert module.has_come(STREAM, 5)
    number("query_code").value = 600
    assert not module.has_come(STREAM, 5)
    number("query_code").value = 700
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        module.has_come(STREAM, 5)


@pytest.mark.parametrize("start", [0, 2])
def test_memory_that_is_gone_is_not_read(module: Any, start: int) -> None:
    whole, pairs = torch.ones(4), pairs_with_gradients()
    loss = whole[start]
    scalars = module.ScalarLaunch(launch_of(module, [0] * 4), -1, [1.0, loss])
    check = checked(module, pairs, loss, None)
    assert scalars.run(STREAM, 55, 1.0, {"loss": loss})
    assert check.run(STREAM, pairs, loss, None, 1)
    whole.untyped_storage().resize_(0)
    assert not scalars.run(STREAM, 55, 1.0, {"loss": loss})
    assert not check.run(STREAM, pairs, loss, None, 1)
    part = torch.ones(100)
    pairs[39][1].grad = part[start : start + 40]
    check = checked(module, pairs, None, None)
    assert check.run(STREAM, pairs, None, None, 1)
    part.untyped_storage().resize_(0)
    assert not check.run(STREAM, pairs, None, None, 1)
    assert number("num_launches").value == 3


@pytest.mark.parametrize("loss", [None, torch.ones(())], ids=["no loss", "a loss"])
def test_a_check_without_gradients_never_reads_the_counts_of_another(
    module: Any, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts live for one check: a prepared launch that went on pointing at them would read freed memory."""
    pytest.importorskip("triton", reason="Triton is not installed")

    def prepare(_: Any, device: Any, grid: int, arguments: Sequence[Any], sizes: Sequence[int]) -> Any:
        return launch_of(module, [kernel_launch.word_of(argument) for argument in arguments], sizes)

    monkeypatch.setattr(kernel_launch, "prepare", prepare)
    monkeypatch.setattr(kernel_launch, "launch", lambda *_: None)
    checks = Checks(torch.zeros(8, dtype=torch.int64), torch.zeros(()), "torch")
    checks._launcher.is_triton = True
    checks.note(None, loss, None, False, 0)
    for number_of_check in range(1, 4):
        counts = torch.ones(5, dtype=torch.int64)
        checks.note(counts, loss, None, False, number_of_check)
        if number_of_check > 1:  # the first went through Triton
            assert words(4)[2:] == [counts.data_ptr(), 5]
        assert checks.repeat([], loss, None, False, number_of_check) == ()
        assert words(4)[2] == checks._no_counts.data_ptr()
        assert words(4)[3] & 0xFFFFFFFF == 0
