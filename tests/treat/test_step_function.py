"""What is no training step is refused by everything that takes one, before anything runs."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from torch import nn

from perfdoctor.errors import UsageError
from perfdoctor.treat.graph_breaks import graph_breaks
from perfdoctor.treat.graph_obstacles import graph_obstacles
from perfdoctor.treat.graphed_step import graphed_step


def yields(x: Any) -> Iterator[Any]:
    yield x


async def awaits(x: Any) -> Any:
    return x


class Yields:
    def __call__(self, x: Any) -> Iterator[Any]:
        yield x


@pytest.mark.parametrize("take", [graph_obstacles, graph_breaks, graphed_step])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "got int"), (None, "got NoneType"), (nn.Linear, "the class Linear"), (yields, "generator function"),
        (awaits, "coroutine function"), (partial(yields, 1), "generator function"), (Yields(), "generator function"),
        (Yields().__call__, "generator function"),
    ],
)  # fmt: skip
def test_what_is_no_step(take: Any, given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        take(given, 1)
    assert str(raised.value).startswith(take.__name__)
