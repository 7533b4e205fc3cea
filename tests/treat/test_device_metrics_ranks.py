"""`DeviceMetrics.read()` where the ranks did not all do the same: nobody waits for ever, no number is another's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import perfdoctor


def read_by_two(folder: Path, case: str) -> list[Any]:
    """What two gloo processes read."""
    script = Path(__file__).parent / "ranks_process.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(perfdoctor.__file__).parents[1])}
    command = [sys.executable, str(script)]
    processes = [
        subprocess.Popen([*command, str(rank), str(folder), case], env=environment, text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE)
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [json.loads(out) for out, _ in outputs]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("order", {"a": 1.5, "b": 10.5}),
        ("idle", {"mean": 3.0}),
        ("later", {"mean": (1 + 2 + 9) / 3}),
        ("nothing", {"loss": 2.0}),
    ],
)
def test_ranks_that_did_not_do_the_same(tmp_path: Path, case: str, expected: dict[str, float]) -> None:
    assert read_by_two(tmp_path, case) == [expected, expected]


@pytest.mark.parametrize(("case", "name", "alone"), [("lacking", "mean", {}), ("lists", "values", {"loss": 1.0})])
def test_an_object_that_one_rank_lacks_is_an_error_on_both(
    tmp_path: Path, case: str, name: str, alone: dict[str, float]
) -> None:
    first, second = read_by_two(tmp_path, case)
    assert first["error"] == second["error"]
    assert first["error"].startswith(f"{name} is a torchmetrics object that rank 1 of 2 ")
    assert (first["alone"], second["alone"]) == ({name: 3.0, "loss": 1.0}, alone)
