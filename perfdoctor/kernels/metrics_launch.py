"""Which implementation a metric update takes, and its cheapest launch (see `kernel_launch`)."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from perfdoctor.errors import UsageError
from perfdoctor.kernels import kernel_launch, metrics_reference, pointer_table
from perfdoctor.kernels.metrics_reference import FLIP, LANES
from perfdoctor.kernels.walker import compiled_walker

KERNELS = ("triton", "torch")
READABLE = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
SPAN = 256
_SMALLEST = 2.3e-308  # below, a float64 has fewer digits, and bits that FLIP does not make long
_NOTE_SIZES = (8, 8, 8, 4, 8, 8, 4)


@functools.cache
def _kernels() -> SimpleNamespace:
    try:
        from perfdoctor.kernels import metrics_triton
    except ImportError as error:
        raise UsageError("Triton is not installed: pass kernel='torch'") from error
    return SimpleNamespace(
        metrics=metrics_triton.metrics_kernel,
        nonfinite=metrics_triton.nonfinite_kernel,
        take=metrics_triton.take_kernel,
    )


def uses_triton(tensor: Tensor, kernel: str | None) -> bool:
    """Whether Triton runs beside this tensor. Raises UsageError where it was asked for and cannot."""
    if kernel == "torch" or type(tensor) is not Tensor:  # a wrapper may merely say that it is on a GPU
        return False
    if tensor.is_cuda:
        return kernel == "triton" or kernel_launch.has_triton()
    if kernel is None:
        return False
    if type(_kernels().metrics).__name__ == "InterpretedFunction":
        return True
    raise UsageError(f"kernel='triton' cannot read {tensor.device.type} tensors: pass kernel=None or 'torch'")


def is_plain(tensor: Tensor) -> bool:
    """Whether a kernel can read the one element of this tensor where it lies."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.dtype in READABLE
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def bits_of(number: float) -> int:
    """A number as the kernel takes it; see FLIP."""
    if abs(number) < _SMALLEST:
        number = 0.0
    elif math.isnan(number):
        number = math.nan
    flipped: int = struct.unpack("<q", struct.pack("<Q", struct.unpack("<Q", struct.pack("<d", number))[0] ^ FLIP))[0]
    return flipped


class Launcher:
    """Launches over one state or record, which stays where it is."""

    def __init__(self, target: Tensor, kernel: str | None) -> None:
        self._target = target
        self._device = target.device
        self.is_triton = uses_triton(target, kernel)
        self._prepared: dict[Any, Any] = {}
        self._repeated: dict[Any, Any] = {}
        self.stream: Callable[[], int] = pointer_table.stream_reader(target.device)
        """the handle of the device's current stream"""

    def accumulate(self, snapshot: Tensor, rows: Sequence[int], values: Sequence[Tensor | float],
                   weight: Tensor | float) -> None:  # fmt: skip
        """See `metrics_reference.accumulate`. One launch for sixteen values."""
        for start in range(0, len(values), LANES):
            stop = start + LANES
            self._accumulate(snapshot, tuple(rows[start:stop]), values[start:stop], weight)

    def _accumulate(self, snapshot: Tensor, rows: tuple[int, ...], values: Sequence[Tensor | float],
                    weight: Tensor | float) -> None:  # fmt: skip
        if not self.is_triton:
            metrics_reference.accumulate(self._target, snapshot, rows, values, weight)
            return
        taken = [_readable(weight), *(_readable(value) for value in values)]
        kinds = _kinds_of(taken)
        arguments = [self._target, snapshot, *taken, *[self._target] * (LANES - len(values))]
        numbers = sum(1 << lane for lane, kind in enumerate(kinds[1:]) if kind is None)
        constants = {
            "PLACES": sum(row << (8 * lane) for lane, row in enumerate(rows)),
            "NUMBERS": numbers,
            "NUM": len(values),
            "WEIGHT_IS_NUMBER": kinds[0] is None,
        }
        self._launch("metrics", (rows, kinds), arguments, constants, 2 + len(values) + 1)

    def repeated(self, rows: Sequence[int], values: Sequence[Tensor | float], weight: Tensor | float) -> Any | None:
        """What repeats the last `accumulate` of these rows with other values of the same kinds: a `ScalarLaunch`.

        Its `run(stream, snapshot's address, weight, values by name)` checks all of them in the one call, and is false
        where they are of other kinds. None where nothing was prepared.
        """
        taken = [weight, *values]
        key = (tuple(rows), _kinds_of(taken))
        launch = self._prepared.get(("metrics", key))
        module = compiled_walker() if launch is not None else None
        if module is None:
            return None
        if key not in self._repeated:
            index = -1 if self._device.type == "cpu" else self._device.index
            self._repeated[key] = module.ScalarLaunch(launch, index, taken)
        return self._repeated[key]

    def note_nonfinite(self, found: Tensor, loss: Tensor | None, excuse: Tensor | None, is_scale: bool,
                       counts: Tensor, check: int) -> Any | None:  # fmt: skip
        """See `metrics_reference.note_nonfinite`. Gives the prepared launch, if there is one."""
        if not self.is_triton:
            metrics_reference.note_nonfinite(self._target, found, loss, excuse, is_scale, counts, check)
            return None
        loss = as_loss(loss)
        mode = excuse_mode(excuse, is_scale)
        arguments = [self._target, found, counts, counts.numel(), self._target if loss is None else loss,
                     self._target if excuse is None else excuse, check]  # fmt: skip
        constants = {"HAS_LOSS": loss is not None, "EXCUSE": mode, "SPAN": SPAN}
        # Where there are counts is part of the key: what repeats the launch of none would go on reading some others.
        has_counts = counts.numel() > 0
        key = (None if loss is None else loss.dtype, mode, None if excuse is None else excuse.dtype, has_counts)
        return self._launch("nonfinite", key, arguments, constants, len(arguments), _NOTE_SIZES)

    def take(self, snapshot: Tensor, found: Tensor) -> None:
        """See `metrics_reference.take`."""
        if not self.is_triton:
            with torch.no_grad():
                metrics_reference.take(self._target, snapshot, found)
            return
        self._launch("take", None, (self._target, snapshot, found), {}, 3)

    def _launch(self, name: str, key: Any, arguments: Sequence[Any], constants: dict[str, Any], num_changing: int,
                sizes: tuple[int, ...] = ()) -> Any | None:  # fmt: skip
        """Launches a kernel whose arguments from the second to number `num_changing` differ from call to call."""
        prepared = self._prepared.get((name, key))
        if prepared is not None:
            words = [kernel_launch.word_of(argument) for argument in arguments[1:num_changing]]
            prepared.run_with(self.stream(), 1, words)
            return prepared
        compiled = kernel_launch.launch(getattr(_kernels(), name), self._device, 1, arguments, constants, 1)
        prepared = kernel_launch.prepare(compiled, self._device, 1, arguments, sizes or (8,) * len(arguments))
        if prepared is not None:
            self._prepared[name, key] = prepared
        return prepared


def as_loss(loss: Tensor | None) -> Tensor | None:
    """A loss that a kernel can read in place."""
    return None if loss is None else _readable(loss)  # type: ignore[return-value]


def excuse_mode(excuse: Tensor | None, is_scale: bool) -> int:
    """What the kernels take as EXCUSE."""
    return 0 if excuse is None else 2 if is_scale else 1


def _kinds_of(values: Sequence[Tensor | float]) -> tuple[torch.dtype | None, ...]:
    return tuple(value.dtype if isinstance(value, Tensor) else None for value in values)


def _readable(value: Tensor | float) -> Tensor | int:
    """What the kernel gets: a tensor that it can read in place, or the bits of a number."""
    if not isinstance(value, Tensor):
        return bits_of(value)
    # Not detached where it is read in place: inside torch.func.grad that makes a wrapper without memory of its own.
    return value if is_plain(value) else value.detach().resolve_neg().to(torch.float64).clone()
