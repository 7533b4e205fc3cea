"""What a trial sees of a loop that no torch optimizer updates: its device, its model, what it trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from perfdoctor.trial.live_loop import LiveLoop

ROOT = Path(__file__).parents[2]


def _seen(train: Callable[[], None]) -> tuple[Any, list[torch.Tensor]]:
    live = LiveLoop()
    live.install()
    try:
        train()
        return live.loop(), live.leaves()
    finally:
        live.remove()


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)).to("cuda")


def test_a_model_updated_by_hand(device: Any) -> None:
    model = _model()

    def train() -> None:
        for (x,) in DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4):
            model(x.to("cuda")).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1 * p.grad)  # type: ignore[arg-type, operator]
                    p.grad = None

    loop, leaves = _seen(train)
    assert (loop.device.type, loop.model, loop.optimizers) == ("cuda", model, ())
    assert {id(each) for each in leaves} == {id(p) for p in model.parameters()}


def test_the_module_that_is_trained_is_the_model_not_one_that_is_only_called(device: Any) -> None:
    teacher = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8))).to("cuda").requires_grad_(False)
    model = _model()
    loop, _ = _seen(lambda: model(teacher(torch.randn(2, 4, device="cuda"))).mean().backward())
    assert loop.model is model


def test_bare_tensors(device: Any) -> None:
    weight = torch.randn(4, device="cuda", requires_grad=True)
    loop, leaves = _seen(lambda: (torch.randn(2, 4, device="cuda") @ weight).square().sum().backward())
    assert (loop.device.type, loop.model) == ("cuda", None)
    assert len(leaves) == 1
    assert leaves[0] is weight


def test_gradients_that_are_asked_for_without_a_backward_call(device: Any) -> None:
    model = _model()
    loop, _ = _seen(
        lambda: torch.autograd.grad(model(torch.randn(2, 4, device="cuda")).sum(), list(model.parameters()))
    )  # type: ignore[arg-type, return-value]
    assert loop.device.type == "cuda"
    assert loop.model is model


def test_batches_alone(device: Any) -> None:
    batches = TensorDataset(torch.randn(8, 4, device="cuda"))

    def train() -> None:
        for _ in DataLoader(batches, batch_size=4):
            pass

    loop, _ = _seen(train)
    assert loop.device.type == "cuda"


def test_a_loop_on_the_host_stays_there() -> None:
    model = torch.nn.Linear(2, 1)
    loop, leaves = _seen(lambda: model(torch.ones(1, 2)).sum().backward())
    assert (loop.device.type, loop.model, len(leaves)) == ("cpu", model, 2)


def test_with_an_optimizer_it_is_what_that_holds(device: Any) -> None:
    model, frozen = _model(), torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train() -> None:
        model(frozen(torch.ones(2, 4)).to("cuda")).mean().backward()
        optimizer.step()

    loop, leaves = _seen(train)
    assert (loop.device.type, loop.model, loop.optimizers, leaves) == ("cuda", model, (optimizer,), [])


HAND = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(16, 1).cuda()
while True:
    for (x,) in DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=4):
        model(x.cuda()).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad = None
"""


def test_treatments_of_a_loop_updated_by_hand_come_to_verdicts(tmp_path: Path) -> None:
    """Its steps are its batches; the device is the emulated one, which treatments that need a GPU do not refuse."""
    (tmp_path / "train.py").write_text(HAND)
    words = ["trial", "--treat=bf16_autocast,pin_memory", "--device", "emulated", "--seconds", "20", "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "perfdoctor", *words, "train.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["verdicts"]
    assert [row["treatment"] for row in rows][:2] == ["bf16_autocast", "pin_memory"]
    assert not any("runs on cpu" in row["reason"] for row in rows)
    assert rows[0]["saving"] is not None, rows[0]["reason"]
