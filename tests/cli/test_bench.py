"""`perfdoctor bench`: text, JSON, the picture, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from perfdoctor.cli.bench import execute
from perfdoctor.errors import UsageError


def test_json_has_every_field_of_the_schema(tmp_path: Path) -> None:
    outcome = execute(["matmul", "--small", "--dims", "16,32", "--format", "json", "-o", str(tmp_path / "b.json")])
    assert outcome.path == str(tmp_path / "b.json")
    document = json.loads(outcome.text)
    assert set(document) == {"schema_version", "kind", "conditions", "roofs", "verbs"}
    assert (document["schema_version"], document["kind"]) == (1, "bench")
    assert document["conditions"]["torch"] == torch.__version__
    assert document["conditions"]["small"] is True
    (verb,) = document["verbs"]
    assert set(verb) == {"verb", "rows", "facts", "notes"}
    row = verb["rows"][0]
    assert set(row) == {
        "name", "sizes", "dtype", "median_us", "spread_ratio", "num_times", "bytes_moved", "num_flops", "bytes_per_s",
        "flops_per_s", "of_measured_ratio", "of_vendor_ratio", "warning",
    }  # fmt: skip
    assert row["num_flops"] == 8192
    assert row["flops_per_s"] == pytest.approx(8192 / (row["median_us"] * 1e-6))
    best = max(row["of_measured_ratio"] for row in verb["rows"] if "wall" not in row["name"])
    assert best == pytest.approx(1.0)


def test_text_and_picture(tmp_path: Path) -> None:
    picture = tmp_path / "roof.svg"
    outcome = execute(["bandwidth", "matmul", "--small", "--dims", "32", "--picture", str(picture)])
    assert outcome.text.index("matmul: square") < outcome.text.index("bandwidth: bytes a second")
    assert "best measured in this run: float32" in outcome.text
    assert "memory copy" in outcome.text
    assert picture.read_text("utf-8").startswith("<svg")
    assert outcome.messages == (f"wrote {picture}",)


def test_one_dim_does_not_tell_a_law() -> None:
    text = execute(["matmul", "--small", "--dims", "16"]).text
    assert "float32: one dim alone does not tell how the time grows" in text
    assert "does not grow as dim^3" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["conv"], "no benchmark 'conv'; there are matmul, mlp, bandwidth, launch, norm"),
        (["matmul", "--dims", "0"], "0 is no side of a matrix"),
        (["matmul", "--dims", "64,-1"], "-1 is no side of a matrix"),
        (["matmul", "--dims", "many"], "'many' is no list of whole numbers"),
        (["matmul", "--dims", ""], "'' is no list of whole numbers"),
        (["launch", "--dims", "64"], "--dims is for matmul"),
        (["matmul", "--dims", "100000000"], "not enough memory: matmul 100000000"),
        (["launch", "--picture", "roof.svg"], "the roofs come from matmul and bandwidth"),
        (["launch", "-o", "no/such/folder/b.json"], "the folder no/such/folder is not there"),
        (["--format", "html"], "invalid choice"),
        (["matmul", "bandwidth", "-o", "roof.svg", "--picture", "./roof.svg"], "-o and --picture are both roof.svg"),
    ],
)
def test_bad_input_is_named_before_the_work(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        execute(arguments)
    assert message in str(caught.value)
