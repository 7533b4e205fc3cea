"""The metric kernels: what can be said without Triton."""

from __future__ import annotations

import pytest
import torch

from perfdoctor.errors import UsageError
from perfdoctor.kernels import metrics_reference
from perfdoctor.kernels.metrics_launch import Launcher, bits_of


def test_numbers_are_never_small_as_integers() -> None:
    """Triton gives an int below 2^31 another type, and the compiled kernel another signature."""
    for number in (0.0, -0.0, 1.0, 2.0, -1.0, 5e-324, 1e-300, 1e300, float("inf"), -float("inf"), float("nan")):
        assert not -(1 << 31) <= bits_of(number) < 1 << 31
        assert -(1 << 63) <= bits_of(number) < 1 << 63


def test_the_kernel_cannot_read_the_cpu() -> None:
    state = metrics_reference.new_state(torch.device("cpu"), 0.5)
    with pytest.raises(UsageError, match="kernel='triton' cannot read cpu tensors"):
        Launcher(state, "triton")
