"""Where the steps of the graph_obstacles tests live."""

import pytest
import torch

import perfdoctor


@pytest.fixture(params=["cpu", "emulated"])
def device(request):
    """The step's tensors: plain ones (moved to the emulated device while watched), or there from the start."""
    if request.param == "cpu":
        if torch.cuda.is_available():
            pytest.skip("with a GPU the step is watched on it, so nothing is moved")
        yield "cpu"
    else:
        with perfdoctor.emulate_cuda():
            yield "cuda"


@pytest.fixture(params=["cpu", "cuda"])
def computing_device(request):
    """Where all is made and computed: the CPU, or the emulated device, on for the time of the test."""
    if request.param == "cpu":
        yield "cpu"
        return
    with perfdoctor.emulate_cuda():
        yield "cuda"
