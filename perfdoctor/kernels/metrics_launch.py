"""Which implementation a metric update takes, and its cheapest launch.

As for the gradient kernels, the first launch of a kind goes through Triton and the next ones through the compiled
walker with prepared arguments, because Triton's own launch costs the host more than the kernel runs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import math
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from perfdoctor.errors import UsageError
from perfdoctor.kernels import metrics_reference, pointer_table
from perfdoctor.kernels.metrics_reference import FLIP, LANES
from perfdoctor.kernels.walker import compiled_walker

KERNELS = ("triton", "torch")
READABLE = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_SPAN = 256
_SMALLEST = 2.3e-308  # below, a float64 has fewer digits, and bits that FLIP does not make long
_interpreter = threading.Lock()  # Triton's interpreter keeps the running program's number in one place for all threads
_log = logging.getLogger("perfdoctor")


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


def check_kernel(kernel: str | None) -> None:
    """Raises UsageError for a name that is no kernel."""
    if kernel is not None and kernel not in KERNELS:
        raise UsageError(f"kernel={kernel!r}: expected one of {', '.join(KERNELS)}, or None to have it chosen")


def uses_triton(tensor: Tensor, kernel: str | None) -> bool:
    """Whether Triton runs beside this tensor. Raises UsageError where it was asked for and cannot."""
    if kernel == "torch" or type(tensor) is not Tensor:  # a wrapper may merely say that it is on a GPU
        return False
    if tensor.is_cuda:
        return kernel == "triton" or _has_triton()
    if kernel is None:
        return False
    if type(_kernels().metrics).__name__ == "InterpretedFunction":
        return True
    raise UsageError(f"kernel='triton' cannot read {tensor.device.type} tensors: pass kernel=None or 'torch'")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


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
        self._triton = uses_triton(target, kernel)
        self._prepared: dict[Any, Any] = {}

    def accumulate(self, snapshot: Tensor, rows: Sequence[int], values: Sequence[Tensor | float],
                   weight: Tensor | float) -> None:  # fmt: skip
        """See `metrics_reference.accumulate`. One launch for sixteen values."""
        for start in range(0, len(values), LANES):
            stop = start + LANES
            self._accumulate(snapshot, tuple(rows[start:stop]), values[start:stop], weight)

    def _accumulate(self, snapshot: Tensor, rows: tuple[int, ...], values: Sequence[Tensor | float],
                    weight: Tensor | float) -> None:  # fmt: skip
        if not self._triton:
            metrics_reference.accumulate(self._target, snapshot, rows, values, weight)
            return
        taken = [_readable(weight), *(_readable(value) for value in values)]
        kinds = tuple(value.dtype if isinstance(value, Tensor) else None for value in taken)
        arguments = [self._target, snapshot, *taken, *[self._target] * (LANES - len(values))]
        numbers = sum(1 << lane for lane, kind in enumerate(kinds[1:]) if kind is None)
        constants = {
            "PLACES": sum(row << (8 * lane) for lane, row in enumerate(rows)),
            "NUMBERS": numbers,
            "NUM": len(values),
            "WEIGHT_IS_NUMBER": kinds[0] is None,
        }
        self._launch("metrics", (rows, kinds), arguments, constants, 2 + len(values) + 1, 1)

    def prepared(
        self, rows: tuple[int, ...], values: Iterable[object], weight: object
    ) -> Callable[[Tensor], None] | None:
        """The launch of an update like an earlier one, to be called with the snapshot; None where it must be made.

        The values are checked here as `accumulate` and its callers check them, in one pass.
        """
        if not self._prepared:
            return None
        kinds: list[torch.dtype | None] = []
        words: list[int] = []
        for value in (weight, *values):
            if type(value) is Tensor:
                if value.numel() != 1 or value.device != self._device or not is_plain(value):
                    return None
                kinds.append(value.dtype)
                words.append(value.data_ptr())
            elif isinstance(value, (float, int)) and (kinds or value >= 0):  # the weight comes first
                kinds.append(None)
                words.append(bits_of(value))
            else:
                return None
        launch = self._prepared.get(("metrics", (rows, tuple(kinds))))
        if launch is None:
            return None
        stream = pointer_table.current_stream(self._device)
        return lambda snapshot: launch.run_with(stream, 1, [snapshot.data_ptr(), *words])  # type: ignore[no-any-return]

    def note_nonfinite(self, found: Tensor, loss: Tensor | None, excuse: Tensor | None, is_scale: bool,
                       counts: Tensor, check: int) -> None:  # fmt: skip
        """See `metrics_reference.note_nonfinite`."""
        if not self._triton:
            metrics_reference.note_nonfinite(self._target, found, loss, excuse, is_scale, counts, check)
            return
        loss = None if loss is None else _readable(loss)  # type: ignore[assignment]
        mode = 0 if excuse is None else 2 if is_scale else 1
        arguments = [self._target, found, self._target if loss is None else loss,
                     self._target if excuse is None else excuse, counts, counts.numel(), check]  # fmt: skip
        constants = {"HAS_LOSS": loss is not None, "EXCUSE": mode, "SPAN": _SPAN}
        key = (None if loss is None else loss.dtype, mode, None if excuse is None else excuse.dtype)
        self._launch("nonfinite", key, arguments, constants, len(arguments), 1, (8, 8, 8, 8, 8, 4, 4))

    def take(self, snapshot: Tensor, found: Tensor) -> None:
        """See `metrics_reference.take`."""
        if not self._triton:
            metrics_reference.take(self._target, snapshot, found)
            return
        self._launch("take", None, [self._target, snapshot, found], {}, 3, 1)

    def _launch(self, name: str, key: Any, arguments: list[Any], constants: dict[str, Any], num_changing: int,
                num_warps: int, sizes: tuple[int, ...] = ()) -> None:  # fmt: skip
        """Launches a kernel whose arguments from the second to number `num_changing` differ from call to call."""
        prepared = self._prepared.get((name, key))
        if prepared is not None:
            words = [_word(argument) for argument in arguments[1:num_changing]]
            prepared.run_with(pointer_table.current_stream(self._device), 1, words)
            return
        kernel = getattr(_kernels(), name)
        if self._device.type == "cpu":
            with _interpreter:
                kernel[(1,)](*arguments, **constants)
            return
        relaxed = pointer_table.is_capturing(self._device)
        with torch.cuda.device(self._device), pointer_table.relaxed_capture() if relaxed else contextlib.nullcontext():
            compiled = kernel[(1,)](*arguments, **constants, num_warps=num_warps)
        self._prepare((name, key), compiled, arguments, sizes or (8,) * len(arguments))

    def _prepare(self, key: Any, compiled: Any, arguments: list[Any], sizes: tuple[int, ...]) -> None:
        module = compiled_walker()
        if module is None or not hasattr(module.Launch, "run_with"):
            return
        try:
            threads = 32 * int(compiled.metadata.num_warps)
            function, shared = int(compiled.function), int(compiled.metadata.shared)
            words = [_word(argument) for argument in arguments]
            with torch.cuda.device(self._device):
                self._prepared[key] = module.Launch(function, 1, threads, shared, words, list(sizes))
        except (AttributeError, TypeError, RuntimeError) as error:
            _log.info("this Triton's kernels are launched through Triton: %s", error)


def _readable(value: Tensor | float) -> Tensor | int:
    """What the kernel gets: a tensor that it can read in place, or the bits of a number."""
    if not isinstance(value, Tensor):
        return bits_of(value)
    value = value.detach()
    return value if is_plain(value) else value.resolve_neg().to(torch.float64).clone()


def _word(argument: Tensor | int) -> int:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument
