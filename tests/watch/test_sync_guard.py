"""Budgets round blocks and functions. Run here on the emulated device; the `gpu` ones on a real one."""

import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from perfdoctor.emulate import emulate_cuda
from perfdoctor.errors import SyncBudgetExceeded, UsageError
from perfdoctor.record import crossings
from perfdoctor.watch.sync_guard import NoDeviceWarning, SyncBudgetWarning, allow_sync, sync_guard

ROOT = Path(__file__).parents[2]


@pytest.fixture
def x() -> Iterator[torch.Tensor]:
    with emulate_cuda():
        yield torch.ones(4, device="cuda")
    assert crossings.LOGS == []


def test_the_error_comes_at_the_call_that_goes_over(x: torch.Tensor) -> None:
    reached = []
    message = r"test_sync_guard\.py:\d+: tensor_to_bool"
    with pytest.raises(SyncBudgetExceeded, match=message), sync_guard(budget=1):  # noqa: PT012
        x.sum().item()
        reached.append("after the first")
        bool(x.sum() > 1)
        reached.append("after the second")
    assert reached == ["after the first"]


def test_steps_have_the_budget_each(x: torch.Tensor) -> None:
    with sync_guard(budget=1) as guard:
        for _ in range(3):
            x.sum().item()
            guard.step()
    assert guard.num_steps == 3
    assert guard.syncs_per_step == 1


def test_a_fraction_is_a_mean_over_the_steps(x: torch.Tensor) -> None:
    with sync_guard(budget=0.1) as guard:
        for step in range(20):
            if step % 10 == 9:
                x.sum().item()
            guard.step()
    with pytest.raises(SyncBudgetExceeded), sync_guard(budget=0.1) as guard:  # noqa: PT012
        for step in range(20):
            if step % 5 == 4:
                x.sum().item()
            guard.step()
    assert guard.num_steps == 10  # nine whole ones, and the one that went over


def test_the_first_step_is_told_apart(x: torch.Tensor) -> None:
    with sync_guard(mode="record") as guard:
        for step in range(5):
            if step == 0:
                x.tolist()
            x.sum().item()
            guard.step()
    rows = {row.kind: (row.first_step, row.later_steps) for row in guard.sites}
    assert rows == {"tolist": (1, 0), "item": (1, 4)}
    assert guard.syncs_per_step == 1


def test_warnings_come_once_a_step(x: torch.Tensor) -> None:
    with pytest.warns(SyncBudgetWarning) as caught, sync_guard(mode="warn") as guard:  # noqa: PT031
        for _ in range(2):
            x.sum().item()
            x.sum().item()
            guard.step()
    assert len(caught) == 2


def test_as_a_decorator_each_call_is_a_step(x: torch.Tensor) -> None:
    guard = sync_guard(budget=1)

    @guard
    def step(reads: int) -> int:
        return sum(int(x.sum()) for _ in range(reads))

    assert step(1) == step(1) == 4
    with pytest.raises(SyncBudgetExceeded):
        step(2)
    assert step(1) == 4
    assert guard.num_steps == 4
    assert step.__name__ == "step"


def test_what_is_allowed_is_not_counted(x: torch.Tensor) -> None:
    with sync_guard() as guard, allow_sync("metrics are wanted"):
        x.sum().item()
    assert len(guard.allowed) == 1
    assert guard.sites == ()
    with pytest.raises(SyncBudgetExceeded), sync_guard():  # noqa: PT012
        with allow_sync("once"):
            pass
        x.sum().item()
    with pytest.raises(UsageError, match="reason"), allow_sync(""):
        pass


def test_first_only_allows_once(x: torch.Tensor) -> None:
    with sync_guard(mode="record") as guard:
        for _ in range(3):
            with allow_sync("lazy initialisation", first_only=True):
                x.sum().item()
    assert len(guard.allowed) == 1
    assert guard.sites[0].first_step == 2


def test_guards_nest(x: torch.Tensor) -> None:
    with sync_guard(budget=3) as outer:
        with pytest.raises(SyncBudgetExceeded), sync_guard() as inner:
            x.sum().item()
        x.sum().item()
    assert sum(row.first_step for row in outer.sites) == 2
    assert sum(row.first_step for row in inner.sites) == 1


def test_other_threads_are_not_charged(x: torch.Tensor) -> None:
    with sync_guard() as guard:
        thread = threading.Thread(target=lambda: x.sum().item())
        thread.start()
        thread.join()
    assert guard.sites == ()


def test_backward_is_charged_to_its_line(x: torch.Tensor) -> None:
    weight = torch.ones(4, device="cuda", requires_grad=True)
    mask = x > 0
    loss = weight[mask].sum()
    with sync_guard(mode="record") as guard:
        loss.backward()
    assert [row.kind for row in guard.sites] == ["boolean_mask"]
    assert guard.sites[0].site.text == "loss.backward()"


def test_outright_waits_and_silent_copies_count(x: torch.Tensor) -> None:
    with sync_guard(mode="record") as guard:
        torch.cuda.synchronize()
        torch.ones(4).to("cuda", non_blocking=True)
    assert {row.kind for row in guard.sites} == {"cuda_synchronize", "h2d_blocking"}


@pytest.mark.parametrize("arguments", [{"mode": "shout"}, {"budget": -1}])
def test_wrong_use(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        sync_guard(**arguments)  # type: ignore[arg-type]


def without_a_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")


def test_without_any_device_it_watches_nothing_and_says_so() -> None:
    without_a_device()
    with pytest.warns(NoDeviceWarning, match=r"`with perfdoctor\.emulate_cuda\(\):`") as caught:  # noqa: PT031
        with sync_guard() as guard:
            torch.ones(3).sum().item()
        sync_guard()(torch.ones)(3)
    assert guard.sites == ()
    assert [Path(row.filename).name for row in caught] == ["test_sync_guard.py"] * 2


def test_where_warnings_are_errors_it_is_said_once_and_breaks_nothing() -> None:
    without_a_device()
    program = (
        "import perfdoctor\n"
        "for _ in range(2):\n"
        "    with perfdoctor.sync_guard() as guard:\n"
        "        pass\n"
        "print(guard.num_steps)\n"
    )
    words = [sys.executable, "-W", "error::UserWarning", "-c", program]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "1\n"
    assert done.stderr.count("perfdoctor.emulate_cuda()") == 1


def test_on_an_emulated_device_there_is_nothing_to_warn_of(x: torch.Tensor) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sync_guard(budget=1):
            x.sum().item()
    assert caught == []


@pytest.mark.gpu
def test_on_a_gpu_the_error_comes_at_the_call_too() -> None:
    x = torch.ones(4, device="cuda")
    filters, mode = list(warnings.filters), torch.cuda.get_sync_debug_mode()
    with pytest.raises(SyncBudgetExceeded, match=r"test_sync_guard\.py:\d+: item"), sync_guard():
        x.sum().item()
    assert torch.cuda.get_sync_debug_mode() == mode
    assert warnings.filters == filters


@pytest.mark.gpu
def test_on_a_gpu_what_torch_does_not_warn_of_is_counted() -> None:
    host = torch.ones(1 << 20)
    x = torch.ones(4, device="cuda")
    with sync_guard(mode="record") as guard:
        torch.cuda.synchronize()
        host.to("cuda", non_blocking=True)
        print(x)
    kinds = {row.kind: row.first_step for row in guard.sites}
    assert kinds == {"cuda_synchronize": 1, "h2d_pageable": 1, "print_tensor": 1}
