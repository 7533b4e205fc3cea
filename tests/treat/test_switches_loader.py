"""How many workers a loop is given, and what the user is told to write."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from switch_loops import CPU
from torch.utils.data import DataLoader, TensorDataset

from perfdoctor.treat import switches_loader
from perfdoctor.treat.switches import treatment
from perfdoctor.treat.switches_loader import fitting_workers
from perfdoctor.treat.treatment import Loop

WORKERS = treatment("dataloader_workers")


def loop(workers: int = 0, share: float | None = None, **options: Any) -> Loop:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=workers, **options)
    return Loop(device=CPU, loader=loader, fetch_cpu_share=share)


@pytest.fixture(params=[2.0])
def cpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    number: float = request.param
    monkeypatch.setattr(switches_loader, "usable_cpus", lambda: number)
    return number


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("cpus", "now", "share", "wanted"),
    [
        (1.0, 0, None, 0),
        (1.5, 0, 0.9, 0),
        (2.0, 0, None, 1),
        (2.0, 0, 0.5, 1),
        (6.0, 0, None, 5),
        (64.0, 0, 1.0, 8),
        (64.0, 1, 1.0, 8),
        (64.0, 8, 1.0, 16),
        (12.0, 8, 1.0, 11),
        # Samples that wait: as many workers as compute for one CPU's time each beside the loop, 4 to 8.
        (1.0, 0, 0.1, 4),
        (2.0, 0, 0.45, 4),  # 1 / 0.45 = 2.2
        (2.0, 0, 0.16, 6),  # 1 / 0.16 = 6.25
        (2.0, 0, 0.01, 8),
        (2.0, 1, 0.0, 8),
        (64.0, 16, 0.1, 32),
    ],
    indirect=["cpus"],
)
def test_as_many_workers_as_fit(cpus: float, now: int, share: float | None, wanted: int) -> None:
    assert fitting_workers(loop(now, share)) == wanted


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("cpus", "now", "share", "why"),
    [
        (2.0, 0, None, None),
        (2.0, 1, None, "the loader has 1 worker already, as many as fit beside the loop on 2 CPUs"),
        (2.0, 1, 0.1, None),
        (2.0, 8, 0.1, "the loader has 8 workers already, as many as fit beside the loop on 2 CPUs"),
        (4.0, 1, None, None),
        (4.0, 3, None, "the loader has 3 workers already, as many as fit beside the loop on 4 CPUs"),
        (4.0, 4, None, "the loader has 4 workers already, as many as fit beside the loop on 4 CPUs"),
        (1.0, 0, None, "this process may use one CPU; a worker would only take turns with it"),
        (1.0, 2, None, "this process may use one CPU; a worker would only take turns with it"),
        (1.0, 0, 0.1, None),
    ],
    indirect=["cpus"],
)
def test_more_workers_are_refused_at_the_number_that_fits(
    cpus: float, now: int, share: float | None, why: str | None
) -> None:
    assert WORKERS.refuses(loop(now, share)) == why


@pytest.mark.parametrize(
    ("cpus", "now", "share", "setting", "remark"),
    [
        (4.0, 0, None, "num_workers=3 (0 now)", "4 CPUs here"),
        (4.0, 1, 0.8, "num_workers=3 (1 now)", "1 now, 4 CPUs here"),
        (2.0, 1, 0.11, "num_workers=8 (1 now)", "1 now, 2 CPUs here, a fetch waits for 89 % of its time"),
    ],
    indirect=["cpus"],
)
def test_the_number_that_is_tried_is_told(
    cpus: float, now: int, share: float | None, setting: str, remark: str
) -> None:
    tried = loop(now, share)
    number = setting.split()[0]
    assert WORKERS.setting_for(tried) == setting
    assert WORKERS.lines_for(tried) == (f"loader = DataLoader(..., {number}, persistent_workers=True)   # {remark}",)
    with WORKERS.applied(tried) as treated:
        assert f"num_workers={treated.loader.num_workers}" == number  # type: ignore[union-attr]


def test_what_does_not_depend_on_the_loop_has_the_same_lines_in_each() -> None:
    fused = treatment("fused_optimizer")
    assert fused.lines_for(loop()) == fused.lines
    assert fused.setting_for(loop()) == ""


def test_workers_that_shall_persist_keep_their_number() -> None:
    persistent = treatment("persistent_workers")
    tried = loop(2)
    assert persistent.lines_for(tried) == ("loader = DataLoader(..., persistent_workers=True)",)
    with persistent.applied(tried) as treated:
        assert treated.loader.num_workers == 2  # type: ignore[union-attr]


def test_more_workers_than_cpus_are_no_warning_of_ours() -> None:
    tried = loop(share=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with WORKERS.applied(tried) as treated:
            assert sum(batch.sum().item() for (batch,) in treated.loader or ()) == 28.0
