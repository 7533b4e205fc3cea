"""The tutorial kernels: PyTorch's variants here, Triton's in the interpreter, and the table that holds them all."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ("vector_add", "gelu", "softmax", "layer_norm", "tensor_sums")
CPU = torch.device("cpu")


def environment(**more: str) -> dict[str, str]:
    found = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}
    found.pop("PYTEST_ADDOPTS", None)
    return found


def test_triton_kernels_in_the_interpreter() -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    cases = Path(__file__).parent / "interpreted_kernels.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(
        command, env=environment(TRITON_INTERPRET="1", PYTHONPATH=path), capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_variants_of_pytorch(name: str) -> None:
    from variants import error_of

    torch.manual_seed(0)
    example = importlib.import_module(name)
    shapes: tuple[tuple[int, ...], ...] = ((1,), (7,), (1025,), (17, 129), (2, 3, 70), (0,), (4, 0))
    if name == "tensor_sums":
        shapes = ((1, 7, 1023, 0, 1025), (5,))
    for dtype in example.TOLERANCE:
        for shape in shapes:
            inputs = example.make_inputs(shape, dtype, CPU)
            for variant in example.VARIANTS:
                if variant.kind == "torch":
                    found = variant.run(*inputs)
                    assert error_of(example, variant, inputs, found) <= 1, (variant.name, dtype, shape)


def test_an_error_is_a_share_of_what_is_allowed() -> None:
    from variants import Variant, error_of

    example = importlib.import_module("vector_add")
    relative, _ = example.TOLERANCE[torch.float32]
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])
    variant = Variant(name="x", run=torch.add, passes=3)

    def error(*values: float) -> float:
        return error_of(example, variant, (x, y), torch.tensor(values, dtype=torch.float64))

    assert error(2.0, 4.0) == 0.0
    assert error(2.0, 4.0 * (1 + 3 * relative)) == pytest.approx(3.0)
    assert error(2.0, math.nan) == math.inf
    assert error(2.0, math.inf) == math.inf
    assert error(2.0) == math.inf  # another shape
    x[0] = math.inf
    assert error(math.inf, 4.0) == 0.0
    assert error(-math.inf, 4.0) == math.inf
    x[0] = math.nan
    assert error(math.nan, 4.0) == 0.0
    assert error(2.0, 4.0) == math.inf


def test_bytes_moved_are_those_of_the_code() -> None:
    def moved(name: str, shape: tuple[int, ...]) -> dict[str, int]:
        example = importlib.import_module(name)
        inputs = example.make_inputs(shape, torch.float32, CPU)
        return {variant.name: variant.moved_bytes(example, inputs) for variant in example.VARIANTS}

    assert moved("vector_add", (10, 100))["Triton"] == 3 * 4000
    # x^3, * c, x +, * c, tanh, 1 +, 0.5 * x: six that read one and write one, one that reads two; the last product too.
    assert moved("gelu", (1000,))["PyTorch, op by op"] == (6 * 2 + 2 * 3) * 4000
    assert moved("gelu", (1000,))["CUDA C++"] == 2 * 4000
    assert moved("softmax", (2, 500))["Triton"] == 2 * 4000
    assert moved("softmax", (1, 40_000))["Triton"] == 3 * 160_000
    assert moved("layer_norm", (10, 100))["torch, unfused"] == 7 * 4000
    assert moved("layer_norm", (10, 100))["Triton"] == 3 * 4000
    assert moved("tensor_sums", (10, 990))["Python loop"] == 4000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.double(), "float64"),
        (lambda x: x.t(), "contiguous"),
        (lambda x: x[:2], "broadcast"),
        (lambda x: x.half(), "broadcast or convert"),
    ],
)
def test_what_a_kernel_cannot_take_is_said(change: Any, words: str) -> None:
    from vector_add import add_triton

    x = torch.ones(3, 3)
    with pytest.raises(ValueError, match=words):
        add_triton(x, change(x))


def test_a_gradient_is_not_cut_off_in_silence() -> None:
    """Kernels without backward refuse what autograd would follow, before anything is launched."""
    from gelu import gelu_cuda, gelu_triton
    from softmax import softmax_triton
    from vector_add import add_cuda, add_triton

    x, plain = torch.ones(4, requires_grad=True), torch.ones(4)
    for call in (gelu_cuda, gelu_triton, softmax_triton, lambda x: add_triton(plain, x), lambda x: add_cuda(x, plain)):
        with pytest.raises(ValueError, match=r"no backward.*no_grad"):
            call(x)


def test_a_row_has_a_dimension() -> None:
    from layer_norm import block_triton

    with pytest.raises(ValueError, match="one weight a column"):
        block_triton(*[torch.tensor(1.0)] * 4)
    with pytest.raises(ValueError, match="on meta for rows"):
        block_triton(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3, device="meta"), torch.ones(3, device="meta"))


def test_a_table_of_mixed_tensors_is_refused() -> None:
    from tensor_sums import make_table, sums_cuda

    with pytest.raises(ValueError, match="no tensors"):
        make_table([])
    with pytest.raises(ValueError, match=r"a table \(1, 2\) on cpu for 2 tensors"):
        sums_cuda([torch.ones(3), torch.ones(2)], make_table([torch.ones(3)]))
    with pytest.raises(ValueError, match="one type"):
        make_table([torch.ones(3), torch.ones(3, dtype=torch.float16)])
    with pytest.raises(ValueError, match="contiguous"):
        make_table([torch.ones(3, 3).t()])
    first, second = torch.ones(3), torch.ones(2, 2)
    assert make_table([first, second]).tolist() == [[first.data_ptr(), 3], [second.data_ptr(), 4]]


def test_the_page_explains_every_example() -> None:
    page = (ROOT / "examples" / "kernels" / "README.md").read_text("utf-8")
    table = importlib.import_module("table")
    assert table.EXAMPLES == EXAMPLES
    for name in EXAMPLES:
        assert f"({name}.py)" in page
        assert (ROOT / "examples" / "kernels" / f"{name}.cu").exists() == (f"({name}.cu)" in page)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the large shapes there")
def test_the_benchmark_runs_small_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from perfdoctor.bench import kernels

    file = tmp_path / "kernels.json"
    assert kernels.main(["--only", "gelu", "--only", "tensor_sums", "--json", str(file)]) == 0
    written = json.loads(file.read_text("utf-8"))
    assert set(written["roofs"]) == {"read", "copy"}
    assert {row["variant"] for row in written["rows"]} == {
        "PyTorch, op by op", "torch", "Python loop", "Python loop + item", "perfdoctor.grad_stats",
    }  # fmt: skip
    for row in written["rows"]:
        assert row["moved_per_s"] == pytest.approx(row["moved_bytes"] / (row["ms"] * 1e-3))
        assert not row["wrong"]
    assert "needs a GPU" in capsys.readouterr().out


def figures(**more: Any) -> dict[str, Any]:
    """Of a kernel that moves 2 GB in half a millisecond, 4 TB/s, under a roof of 5 TB/s."""
    return {
        "example": "GeLU", "shape": "4 x 4", "dtype": "torch.float32", "variant": "Triton", "ms": 0.5, "spread": 0.01,
        "moved_bytes": 2_000_000_000, "moved_per_s": 4e12, "useful_per_s": 2e12, "of_roof": 0.8, "error": 0.25,
        "wrong": False,
    } | more  # fmt: skip


def test_the_page_table_is_made_from_the_written_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from table import main

    failed = {"example": "GeLU", "shape": "4 x 4", "dtype": "torch.float32", "variant": "C++", "failed": "no nvcc"}
    rows = [figures(), {**failed, "wrong": False}, figures(example="softmax", ms=0.0125, error=math.inf, wrong=True)]
    file = tmp_path / "figures.json"
    file.write_text(json.dumps({"conditions": "a GPU", "roofs": {"copy": 5e12}, "rows": rows}), "utf-8")
    assert main(["--markdown", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a GPU; roofs: copy 5.00 TB/s.",
        "",
        "| kernel | variant | ms | moved | GB/s | of the roof | useful GB/s | error/allowed |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        "| GeLU, 4 x 4, float32 | Triton | 0.5 | 2 GB | 4000 | 80.0% | 2000 | 0.25 |",
        "|  | C++ | failed |  |  |  |  |  |",
        "| softmax, 4 x 4, float32 | Triton | 0.0125 | 2 GB | 4000 | 80.0% | 2000 | inf (wrong) |",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "no JSON"), ("[]", "lacks conditions, roofs, rows"), ('{"rows": []}', "lacks conditions, roo")],
)
def test_a_file_without_figures_is_named(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from table import main

    file = tmp_path / "other.json"
    file.write_text(text, "utf-8")
    assert main(["--markdown", str(file)]) == 2
    assert words in capsys.readouterr().err
    assert main(["--markdown", str(tmp_path / "nothing.json")]) == 2
    assert "nothing.json" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from table import main

    for path in (tmp_path, tmp_path / "nowhere" / "figures.json"):
        with pytest.raises(SystemExit) as stopped:
            main(["--json", str(path)])
        assert stopped.value.code == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert str(path) in said.err


def test_the_pages_place_for_the_table_is_there_once() -> None:
    page = (ROOT / "examples" / "kernels" / "README.md").read_text("utf-8")
    assert page.count("<!-- KERNELS: begin -->") == page.count("<!-- KERNELS: end -->") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the large shapes there")
@pytest.mark.parametrize("name", EXAMPLES)
def test_each_is_a_script_of_its_own(name: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / "kernels" / f"{name}.py"
    command = [sys.executable, str(script), "--dtype", "bfloat16"]
    env = environment()
    env.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert importlib.import_module(name).TITLE in done.stdout
