"""docs/treatments.md: every python block runs, and its table says of each switch what the switch says itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import perfdoctor
from perfdoctor.treat.dynamo_state import forced_backend
from perfdoctor.treat.switches import TREATMENTS

PAGE = (Path(__file__).parents[2] / "docs" / "treatments.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ON_THE_HOST = "graph_breaks"  # the emulated device hides the compiler


def names(device: str) -> dict[str, Any]:
    """What the page takes for granted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = (torch.ones(5, 4, device=device), torch.zeros(5, 2, device=device))
    return {
        "device": device, "model": model, "optimizer": optimizer, "batch": batch, "x": batch[0], "y": batch[1],
        "loader": DataLoader(TensorDataset(torch.randn(20, 4), torch.randn(20, 2)), batch_size=5),
        "criterion": nn.MSELoss(), "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10), "loss": batch[0].mean(),
        "writer": lambda reading: None, "metrics": perfdoctor.DeviceMetrics(),
    }  # fmt: skip


@pytest.fixture(params=["cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU: the page's loop runs on it")
    if request.param == "emulated":
        with perfdoctor.emulate_cuda():
            yield "cuda"
    else:
        yield request.param


def needs_cuda(block: str) -> bool:
    return "graphed_step(" in block


@pytest.mark.parametrize("index", range(len(BLOCKS)))
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")  # no step before, on a GPU
def test_a_block_runs(index: int, device: str, request: pytest.FixtureRequest) -> None:
    block = BLOCKS[index]
    kind = request.node.callspec.params["device"]
    if kind == "cpu" and needs_cuda(block):
        pytest.skip("needs a CUDA device, or the emulated one")
    if kind == "emulated" and ON_THE_HOST in block:
        pytest.skip("runs on the CPU: the emulated device hides the compiler")
    space = names(device)
    exec(BLOCKS[0], space)  # train_step, and the imports
    with forced_backend("eager") if ON_THE_HOST in block else nullcontext():  # no C++ compiler needed
        exec(compile(block, f"docs/treatments.md, block {index}", "exec"), space)
    assert all(bool(p.isfinite().all()) for p in space["model"].parameters())


def test_the_page_has_a_block_for_each_treatment() -> None:
    text = "\n".join(BLOCKS)
    for name in ("DevicePrefetcher", "DeviceMetrics", "NonFiniteWatch", "graphed_step", "graph_obstacles",
                 "compile_model", "graph_breaks", "clip_grad_norm_", "TREATMENTS"):  # fmt: skip
        assert f"perfdoctor.{name}(" in text or f"perfdoctor.{name}:" in text, name
    for block in BLOCKS[1:]:
        assert 2 <= len(block.strip().splitlines()) <= 6, block


def test_the_table_claims_what_the_switches_claim() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", PAGE, re.MULTILINE))
    assert list(rows) == [treatment.name for treatment in TREATMENTS]
    for treatment in TREATMENTS:
        claim = rows[treatment.name]
        if treatment.numerics.bitwise:
            assert claim.startswith("bitwise"), treatment.name
        else:
            assert float(claim) == treatment.numerics.rtol, treatment.name


def test_links_lead_to_headings() -> None:
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#(.*?)\)", PAGE)) <= anchors
