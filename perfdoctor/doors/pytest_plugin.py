"""pytest plugin: `@pytest.mark.sync_budget(n)` fails a test whose code makes the host wait more than n times.

    @pytest.mark.sync_budget(0)
    def test_step(batch):
        train_step(model, batch)

On a machine without a GPU the test runs on the emulated CUDA device. The failure lists every site: line, kind, advice.
Set-up in fixtures is not counted; a block inside the test can be let off with `perfdoctor.allow_sync("reason")`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from perfdoctor.units import format_plural

if TYPE_CHECKING:
    from perfdoctor.watch.sync_guard import SyncGuard


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "sync_budget(n): fail when the test makes the host wait for the CUDA device more than n times"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Fixtures of a marked test must see the emulated device too."""
    if item.get_closest_marker("sync_budget") is None:
        return (yield)
    with _device():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Guard the test's own code."""
    marker = item.get_closest_marker("sync_budget")
    if marker is None:
        return (yield)
    from perfdoctor.watch.sync_guard import sync_guard

    budget = _budget(marker)
    with sync_guard(budget, mode="record") as guard:
        result = yield
    num_syncs = sum(row.first_step + row.later_steps for row in guard.sites)
    if num_syncs > budget * max(guard.num_steps, 1):
        pytest.fail(_explained(guard, num_syncs, budget), pytrace=False)
    return result


def _budget(marker: pytest.Mark) -> float:
    values = (*marker.args, *marker.kwargs.values())
    if len(values) != 1 or not isinstance(values[0], (int, float)) or values[0] < 0:
        raise pytest.UsageError("sync_budget takes one number, 0 or more: @pytest.mark.sync_budget(0)")
    return float(values[0])


def _device() -> Any:
    import torch

    if torch.cuda.is_available():
        return nullcontext()
    from perfdoctor.emulate import emulate_cuda

    return emulate_cuda()


def _explained(guard: SyncGuard, num_syncs: int, budget: float) -> str:
    rows = [f"{format_plural(num_syncs, 'sync')}, {budget:g} allowed:"]
    for row in guard.sites:
        rows.append(f"  {row.first_step + row.later_steps} x {row}")
        if row.site.text:
            rows.append(f"        {row.site.text}")
    return "\n".join(rows)
