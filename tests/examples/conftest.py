"""The examples are scripts beside each other: their folder is on the path of these tests only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kernels"
SHARED = ("variants", "tiling", "page_table", "table", "vector_add", "gelu", "softmax", "layer_norm", "tensor_sums")


@pytest.fixture(scope="session", autouse=True)
def _examples_on_path() -> Iterator[None]:
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for name in SHARED:
        sys.modules.pop(name, None)
