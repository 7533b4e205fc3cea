"""Switches that do not fit a loop say why, and are not applied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from switch_loops import CPU, NAMES, small_loop
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from perfdoctor.errors import TreatmentRefused, UsageError
from perfdoctor.treat.switches import treated, treatment
from perfdoctor.treat.switches_precision import autocasts
from perfdoctor.treat.treatment import Loop


def reason(name: str, **fields: Any) -> str:
    loop = Loop(**{"device": CPU, **fields})
    found = treatment(name).refuses(loop)
    assert found
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_loop_is_refused_with_what_is_missing(name: str) -> None:
    if name == "gc_frozen":
        assert treatment(name).refuses(Loop(device=CPU)) is None
        return
    assert any(word in reason(name) for word in ("pass", "needs", "CUDA", "no DataLoader was iterated"))


@pytest.mark.parametrize(
    "name",
    ["tf32", "cudnn_benchmark", "pin_memory", "prefetch", "log_every_n", "our_clip", "compile_reduce_overhead",
     "compile_max_autotune"],
)  # fmt: skip
def test_what_needs_cuda_says_where_the_loop_runs(name: str) -> None:
    loop = small_loop()
    assert "cpu" in reason(name, model=loop.model, optimizers=loop.optimizers, loader=loop.loader).lower()


def test_refusals_name_what_does_not_fit() -> None:
    linear = nn.Linear(3, 3)
    loop = small_loop()
    assert "convolution" in reason("channels_last", model=linear)
    assert "bfloat16" in reason("bf16_autocast", model=nn.Linear(3, 3, dtype=torch.bfloat16))
    assert "no floating-point" in reason("bf16_autocast", model=nn.ReLU())
    assert "IterableDataset" in reason("dataloader_workers", loader=DataLoader(Stream()))
    assert "list" in reason("dataloader_workers", loader=[1, 2])
    assert "no workers" in reason("persistent_workers", loader=loop.loader)
    already = DataLoader(TensorDataset(torch.zeros(4)), num_workers=1, persistent_workers=True)
    assert "already" in reason("persistent_workers", loader=already)
    assert "channels_last already" in reason(
        "channels_last", model=nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    )


def test_a_loop_that_runs_under_autocast_is_refused_another() -> None:
    model = nn.Linear(3, 3)
    assert treatment("bf16_autocast").refuses(Loop(device=CPU, model=model)) is None
    assert reason("bf16_autocast", model=model, autocast=True) == "the loop runs under autocast already"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_autocast_is_seen_where_it_is_on(kind: str) -> None:
    assert not autocasts()
    with torch.autocast("cpu", torch.bfloat16) if kind == "cpu" else _cuda_autocast():
        assert autocasts()
        with torch.autocast(kind, enabled=False):
            assert not autocasts()
    assert not autocasts()


@contextmanager
def _cuda_autocast() -> Iterator[None]:
    """As torch.autocast("cuda") sets it, which disables itself with a warning where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_fused_refuses_what_has_no_fused_kernel() -> None:
    class Own(torch.optim.SGD):
        pass

    p = [nn.Parameter(torch.zeros(3))]
    assert "RMSprop has no fused kernel" in reason("fused_optimizer", optimizers=(torch.optim.RMSprop(p),))
    assert "Own has no fused kernel" in reason("fused_optimizer", optimizers=(Own(p, lr=0.1),))
    assert "fused already" in reason("fused_optimizer", optimizers=(torch.optim.Adam(p, fused=True),))
    mixed = [p[0], nn.Parameter(torch.zeros(3, device="meta"))]
    assert "several devices (cpu, meta)" in reason("fused_optimizer", optimizers=(torch.optim.Adam(mixed),))
    assert "differentiable" in reason("fused_optimizer", optimizers=(torch.optim.Adam(p, differentiable=True),))


def test_what_is_refused_is_not_applied() -> None:
    with pytest.raises(TreatmentRefused, match="tf32: TF32 needs a CUDA device"), treated(small_loop(), "tf32"):
        pass
    with pytest.raises(UsageError, match=r"no treatment 'turbo'; there are: .*prefetch"):
        treatment("turbo")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))
