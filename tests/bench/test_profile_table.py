"""`profile_table`: the ops of a function, and its stacks in the collapsed format."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import perfdoctor
from perfdoctor.bench.profile_table import ProfiledOp, ProfileTable, profile_table
from perfdoctor.errors import UsageError

_LEFT = torch.ones(128, 128)


def inner_product() -> torch.Tensor:
    return _LEFT @ _LEFT


def outer_sum() -> torch.Tensor:
    return inner_product().sum()


def test_ops_are_counted_and_ordered() -> None:
    table = profile_table("product", outer_sum, runs=4)
    by_name = {op.name: op for op in table.ops}
    assert by_name["aten::mm"].num_calls == 4
    assert by_name["aten::sum"].num_calls == 4
    times = [op.self_ns for op in table.ops]
    assert times == sorted(times, reverse=True)
    assert table.total_ns >= sum(times) * (1 - 1e-9)


def test_on_the_cpu_the_table_says_so() -> None:
    table = profile_table("product", outer_sum)
    assert table.timed_on == "CPU"
    assert "CPU time: no work of it ran on a GPU (3 runs" in str(table).splitlines()[0]
    assert len(profile_table("product", outer_sum, top=1).ops) == 1


def test_the_table_prints_shares_of_a_run() -> None:
    ops = (
        ProfiledOp(name="aten::mm", num_calls=4, self_ns=3e6),
        ProfiledOp(name="aten::sum", num_calls=2, self_ns=1e6),
    )
    text = str(ProfileTable(name="x", timed_on="GPU", num_runs=2, total_ns=4e6, ops=ops))
    assert text.splitlines() == [
        "x: 4 ms a run, device time on the GPU (2 runs, under torch.profiler)",
        "  aten::mm       3 ms    75 %      2 x",
        "  aten::sum      1 ms    25 %      1 x",
    ]


def test_stacks_lead_from_the_function_to_the_op(tmp_path: Path) -> None:
    path = tmp_path / "product.collapsed"
    table = profile_table("product", outer_sum, with_stack=path)
    lines = path.read_text("utf-8").splitlines()
    assert path.read_text("utf-8") == table.collapsed_stacks()
    assert all(re.fullmatch(r"[^;]+(;[^;]+)* [1-9]\d*", line) for line in lines)
    (product,) = [line for line in lines if re.search(r"aten::mm \d+$", line)]
    frames = product.rsplit(" ", 1)[0].split(";")
    assert frames[0].endswith(": outer_sum")  # nothing of the test or the profiler above it
    assert frames[1].endswith(": inner_product")
    assert not any("torch/profiler" in line or "bench/profile_table.py" in line for line in lines)


def test_backward_keeps_its_ops() -> None:
    weight = torch.ones(32, 32, requires_grad=True)
    table = profile_table("backward", lambda: (weight @ weight).sum().backward(), with_stack=True, top=50)
    assert "MmBackward0" in table.collapsed_stacks()
    assert {op.name: op.num_calls for op in table.ops}["aten::mm"] == 3 * 3  # one forward, two backward


def test_two_profiles_stay_apart() -> None:
    first = profile_table("sum", lambda: _LEFT.sum())
    before = str(first)
    profile_table("product", outer_sum)
    assert str(first) == before
    assert "aten::mm" not in {op.name for op in first.ops}


def test_a_profile_without_stacks_says_how_to_get_them() -> None:
    with pytest.raises(UsageError, match="with_stack=True"):
        profile_table("sum", lambda: _LEFT.sum()).collapsed_stacks()


def test_another_profiler_is_named() -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True),
        pytest.raises(UsageError, match=r"another torch\.profiler is running"),
    ):
        profile_table("sum", lambda: _LEFT.sum())


def test_the_profiler_is_stopped_when_the_function_fails() -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        profile_table("bad", fail, warmup=0)
    assert profile_table("sum", lambda: _LEFT.sum()).ops


def test_ops_of_threads_that_the_function_starts_count() -> None:
    if "profile_all_threads" not in str(torch._C._profiler._ExperimentalConfig.__init__.__doc__):
        pytest.skip("this torch profiles one thread at a time")

    def run() -> None:
        threads = [threading.Thread(target=inner_product) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    table = profile_table("threads", run, runs=2, top=50)
    assert {op.name: op.num_calls for op in table.ops}["aten::mm"] == 3 * 2


def test_a_function_without_ops_says_so() -> None:
    table = profile_table("nothing", lambda: None)
    assert table.ops == ()
    assert str(table).splitlines()[1:] == ["  no op of torch was called, and nothing ran on a GPU"]


def test_a_function_that_profiles_itself_is_refused() -> None:
    def run() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
            _LEFT.sum()

    with pytest.raises(UsageError, match=r"a torch\.profiler of its own"):
        profile_table("inner", run)
    with pytest.raises(UsageError, match=r"'inner': another torch\.profiler is running"):
        profile_table("outer", lambda: profile_table("inner", outer_sum), warmup=0)
    assert profile_table("sum", lambda: _LEFT.sum()).ops


@pytest.mark.parametrize("where", ["", "nowhere/stacks", 3, None])
def test_a_file_that_cannot_be_is_refused_before_the_work(where: Any, tmp_path: Path) -> None:
    calls: list[int] = []
    path = tmp_path / where if isinstance(where, str) else where
    with pytest.raises(UsageError, match="with_stack="):
        profile_table("sum", lambda: calls.append(1), with_stack=path)
    assert calls == []


def test_on_the_emulated_device_the_profiler_stays_on_the_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    with perfdoctor.emulate_cuda():
        left = torch.ones(8, 8, device="cuda")
        table = profile_table("product", lambda: left @ left, top=50)
    assert table.timed_on == "CPU"
    assert "aten::mm" in {op.name for op in table.ops}
    assert "Failed to record CUDA event" not in capfd.readouterr().err


@pytest.mark.parametrize("fn", [3, None, "x"])
def test_what_cannot_be_called_is_named(fn: Any) -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        profile_table("x", fn)


@pytest.mark.parametrize("options", [{"top": 0}, {"runs": 0}, {"warmup": -1}, {"top": 2.5}, {"runs": "3"}])
def test_counts_below_one_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        profile_table("sum", lambda: _LEFT.sum(), **options)


@pytest.mark.gpu
def test_kernels_are_timed_on_the_gpu(tmp_path: Path) -> None:
    left = torch.ones(1024, 1024, device="cuda")
    path = tmp_path / "stacks"
    table = profile_table("product", lambda: left @ left, runs=5, with_stack=path)
    assert table.timed_on == "GPU"
    assert table.ops[0].num_calls in (4, 5)  # one kernel a run; the first of a session may be missing
    assert "aten::mm" in path.read_text("utf-8")
