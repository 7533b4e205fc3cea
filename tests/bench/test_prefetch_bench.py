"""The prefetch benchmark: every rival gives the loop the same batches in the same order."""

from __future__ import annotations

import argparse

import pytest
import torch

import perfdoctor
from perfdoctor.bench import prefetch


@pytest.mark.parametrize("name", list(prefetch.ways(argparse.Namespace(depth=2))))
def test_every_way_gives_the_batches_of_the_loader_on_the_device(name: str) -> None:
    with perfdoctor.emulate_cuda():
        feed, pinned = prefetch.ways(argparse.Namespace(depth=2))[name]
        pool = prefetch.host_pool(2, 4, pinned)
        for _ in range(2):
            given = list(feed(prefetch._Pool(pool, 9)))
            assert all(x.is_cuda and y.is_cuda for x, y in given)
            assert len(given) == 9
            for i, (x, y) in enumerate(given):
                assert torch.equal(x.cpu(), pool[i % 4][0])
                assert torch.equal(y.cpu(), pool[i % 4][1])


def test_it_says_so_where_there_is_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    assert prefetch.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().out
