"""What the tests of the treatments share: the devices they run on."""

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


@pytest.fixture
def emulated():
    """The emulated device, on for the time of the test."""
    with perfdoctor.emulate_cuda():
        yield


@pytest.fixture
def memory_as_found():
    """Memory that nobody has written to holds NaN, not by chance a zero."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before the test, nor left after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
