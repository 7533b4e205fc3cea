"""docs/treatments.md: every python block runs, and its table says of each switch what the switch says itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import perfdoctor
from perfdoctor.errors import TreatmentRefused
from perfdoctor.treat.dynamo_state import forced_backend
from perfdoctor.treat.switches import TREATMENTS

PAGE = (Path(__file__).parents[2] / "docs" / "treatments.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ON_THE_HOST = "graph_breaks"  # the emulated device hides the compiler


@pytest.fixture(params=["cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU: the page's loop runs on it")
    if request.param == "emulated":
        with perfdoctor.emulate_cuda():
            yield "cuda"
    else:
        yield request.param


NEEDS_A_DEVICE = "graphed_step("  # the emulated one will do


def run_page(index: int) -> dict[str, Any]:
    """What is there after the page's first block, its preamble, and one other."""
    torch.manual_seed(0)
    space: dict[str, Any] = {"__name__": "__main__"}
    for at in (0, index):
        exec(compile(BLOCKS[at], f"docs/treatments.md, block {at}", "exec"), space)
    return space


@pytest.mark.parametrize("index", range(1, len(BLOCKS)))
def test_a_block_runs_behind_the_preamble_alone(
    index: int, device: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    block = BLOCKS[index]
    kind = request.node.callspec.params["device"]
    if kind == "emulated" and ON_THE_HOST in block:
        pytest.skip("runs on the CPU: the emulated device hides the compiler")
    if kind == "cpu" and NEEDS_A_DEVICE in block:
        with pytest.raises(TreatmentRefused, match="CUDA"):
            run_page(index)
        return
    with forced_backend("eager") if ON_THE_HOST in block else nullcontext():  # no C++ compiler needed
        space = run_page(index)
    assert space["device"] == device
    assert space["loss"].isfinite()
    assert all(bool(p.isfinite().all()) for p in space["model"].parameters())


def test_the_page_says_which_block_needs_a_gpu() -> None:
    sections = dict(re.findall(r"^## (.*?)$\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
    for heading, text in sections.items():
        assert ("Needs a GPU" in text) == (
            NEEDS_A_DEVICE in "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
        ), heading


def test_the_page_has_a_block_for_each_treatment() -> None:
    text = "\n".join(BLOCKS)
    for name in ("DevicePrefetcher", "DeviceMetrics", "NonFiniteWatch", "graphed_step", "graph_obstacles",
                 "compile_model", "graph_breaks", "clip_grad_norm_", "TREATMENTS"):  # fmt: skip
        assert f"perfdoctor.{name}(" in text or f"perfdoctor.{name}:" in text, name
    for block in BLOCKS[1:]:
        assert 2 <= len(block.strip().splitlines()) <= 6, block


def test_the_table_claims_what_the_switches_claim() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|$", PAGE, re.MULTILINE))
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
