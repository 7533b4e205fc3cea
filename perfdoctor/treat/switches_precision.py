"""Treatments that change how the model computes: bf16 autocast, TF32, cuDNN's choice of kernels, channels_last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from perfdoctor.treat.batch_tree import mapped_tensors
from perfdoctor.treat.cures import CURES
from perfdoctor.treat.stand_in import StandIn
from perfdoctor.treat.treatment import Loop, Numerics, Treatment
from perfdoctor.watch.patches import Patches

NO_MODEL = "the loop's model is not known: pass model="
_LOW = (torch.bfloat16, torch.float16)
_BF16 = "_perfdoctor_bf16_autocast"  # marks a forward that runs under it


def autocasts() -> bool:
    """Whether torch.autocast is on here, for CUDA or the CPU."""
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


def has_convolution(model: torch.nn.Module) -> bool:
    """Whether the model convolves."""
    return any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in model.modules())


def needs_cuda(loop: Loop, what: str) -> str | None:
    """The refusal of a treatment that only a CUDA device has."""
    if loop.device.type != "cuda":
        return f"{what} needs a CUDA device; the loop runs on {loop.device}"
    return None


def _refuse_bf16(loop: Loop) -> str | None:
    if loop.model is None:
        return NO_MODEL
    floats = [p.dtype for p in loop.model.parameters() if p.is_floating_point()]
    if not floats:
        return "the model has no floating-point parameters"
    if all(dtype in _LOW for dtype in floats):
        return f"the model's parameters are {floats[0]} already"
    if torch.is_autocast_enabled(loop.device.type) or hasattr(loop.model.forward, _BF16):
        return "autocast is on already"
    if loop.autocast:
        return "the loop runs under autocast already"
    if loop.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"{torch.cuda.get_device_name(loop.device)} has no bfloat16 arithmetic (compute capability 8.0 has)"
    if loop.device.type not in ("cuda", "cpu"):
        return f"tried on cuda and cpu only; the loop runs on {loop.device}"
    return None


@contextmanager
def _bf16(loop: Loop) -> Iterator[Loop]:
    """The forward pass under autocast; what it gives is float32 again, so that the loss is computed as before."""
    model: Any = loop.model
    kind = loop.device.type
    if hasattr(model.forward, _BF16):
        yield loop
        return

    def under_autocast(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype=torch.bfloat16):
            given = plain(*args, **kwargs)
        return mapped_tensors(given, _widened)

    forward = StandIn(model.forward, under_autocast)
    setattr(forward, _BF16, True)
    patches = Patches()
    try:
        patches.replace(model, "forward", forward)
        yield loop
    finally:
        patches.undo()


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _refuse_tf32(loop: Loop) -> str | None:
    refusal = needs_cuda(loop, "TF32")
    if refusal:
        return refusal
    if torch.cuda.get_device_capability(loop.device) < (8, 0):
        return f"{torch.cuda.get_device_name(loop.device)} has no TF32 (compute capability 8.0 or newer has)"
    if _matmul_precision() in ("high", "medium", "tf32"):
        return "matrix products may use TF32 already"
    return None


def _matmul_precision() -> str:
    """As `torch.get_float32_matmul_precision`, which raises where the script mixed torch's old and new switches."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision)


@contextmanager
def _tf32(loop: Loop) -> Iterator[Loop]:
    """`set_float32_matmul_precision` keeps the old switch (allow_tf32) and the new one (fp32_precision, torch 2.9) in
    step; where the script mixed them, and torch refuses to read the old one, the new one alone is set."""
    matmul: Any = torch.backends.cuda.matmul
    new = matmul.fp32_precision if hasattr(matmul, "fp32_precision") else None
    try:
        old: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:
        old = None
    try:
        if old is None:
            matmul.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        yield loop
    finally:
        if old is not None:
            torch.set_float32_matmul_precision(old)
        if new is not None and matmul.fp32_precision != new:
            matmul.fp32_precision = new


def _refuse_cudnn_benchmark(loop: Loop) -> str | None:
    refusal = needs_cuda(loop, "cudnn.benchmark")
    if refusal:
        return refusal
    if loop.model is None:
        return NO_MODEL
    if not has_convolution(loop.model):
        return "the model has no convolution"
    if torch.backends.cudnn.benchmark:
        return "torch.backends.cudnn.benchmark is on already"
    if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for; the fastest may be another"
    return None


@contextmanager
def _cudnn_benchmark(loop: Loop) -> Iterator[Loop]:
    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = True
        yield loop
    finally:
        torch.backends.cudnn.benchmark = before


def _refuse_channels_last(loop: Loop) -> str | None:
    if loop.model is None:
        return NO_MODEL
    if not any(isinstance(module, torch.nn.Conv2d) for module in loop.model.modules()):
        return "the model has no two-dimensional convolution"
    if isinstance(loop.model, torch.nn.parallel.DistributedDataParallel):
        return "DistributedDataParallel has laid out its buckets; convert the model before it is wrapped"
    if any(torch.nn.parameter.is_lazy(p) for p in loop.model.parameters()):
        return "the model has parameters without a shape yet (lazy modules): run one step before"
    if _is_laid_out(loop.model):
        return "the model is in channels_last already"
    return None


def _is_laid_out(model: torch.nn.Module) -> bool:
    weights = [p for p in model.parameters() if p.dim() == 4]
    return all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)


@contextmanager
def _channels_last(loop: Loop) -> Iterator[Loop]:
    """Weights, their gradients and optimizer state, and what goes into the model. Back in their own memory after."""
    model: Any = loop.model
    if _is_laid_out(model):
        yield loop
        return
    moved = [_Relaid(p) for p in [*model.parameters(), *model.buffers()] if p.dim() == 4]
    hook = None
    try:
        for each in moved:
            each.relay(loop.optimizers)
        hook = model.register_forward_pre_hook(_relay_inputs, with_kwargs=True)
        yield loop
    finally:
        if hook is not None:
            hook.remove()
        for each in moved:
            each.put_back(loop.optimizers)


class _Relaid:
    """A tensor of four dimensions whose values move to channels_last memory and back to where they were."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.memory = tensor.detach()

    def relay(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        self._lay_out(lambda t: t.contiguous(memory_format=torch.channels_last), optimizers)

    def put_back(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        strides = self.memory.stride()

        def as_before(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.stride() == strides:
                return tensor
            return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

        trained = self.tensor.detach()
        self._lay_out(as_before, optimizers)
        with torch.no_grad():
            if trained.data_ptr() != self.memory.data_ptr():
                self.memory.copy_(trained)
            self.tensor.data = self.memory

    def _lay_out(
        self, layout: Callable[[torch.Tensor], torch.Tensor], optimizers: tuple[torch.optim.Optimizer, ...]
    ) -> None:
        with torch.no_grad():
            # The gradient first: torch wants it and its tensor alike only at the moment it is assigned.
            grad = self.tensor.grad if self.tensor.is_leaf else None
            self.tensor.data = layout(self.tensor.detach())
            if grad is not None:
                self.tensor.grad = layout(grad)
            for optimizer in optimizers:
                state = optimizer.state.get(self.tensor) or {}
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == self.tensor.shape:
                        state[name] = layout(value)


def _relay_inputs(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_relaid_input, args)), {name: _relaid_input(value) for name, value in kwargs.items()}


def _relaid_input(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


PRECISION = (
    Treatment(
        name="bf16_autocast",
        cures=CURES["bf16_autocast"],
        numerics=Numerics(rtol=2e-2, why="bfloat16 keeps 8 bits: each result is rounded by up to 0.4 %"),
        refuses=_refuse_bf16,
        applied=_bf16,
        lines=("with torch.autocast(device.type, torch.bfloat16):", "    loss = loss_fn(model(x), y)"),
    ),
    Treatment(
        name="tf32",
        cures=CURES["tf32"],
        numerics=Numerics(
            rtol=2e-2,
            # Measured on an H200: 1.2 % of the loss after six steps of AdamW, whose first steps follow signs.
            why="factors of matrix products are rounded to 10 bits (0.05 %), which an optimizer's first steps amplify",
        ),
        refuses=_refuse_tf32,
        applied=_tf32,
        lines=("torch.set_float32_matmul_precision('high')",),
    ),
    Treatment(
        name="cudnn_benchmark",
        cures=CURES["cudnn_benchmark"],
        numerics=Numerics(rtol=1e-3, why="another convolution algorithm sums in another order"),
        refuses=_refuse_cudnn_benchmark,
        applied=_cudnn_benchmark,
        lines=("torch.backends.cudnn.benchmark = True",),
    ),
    Treatment(
        name="channels_last",
        cures=CURES["channels_last"],
        numerics=Numerics(
            rtol=1e-3,
            why="another convolution kernel sums in another order; dropout on feature maps draws in memory order, "
            "so that its masks are others",
        ),
        refuses=_refuse_channels_last,
        applied=_channels_last,
        lines=(
            "model = model.to(memory_format=torch.channels_last)",
            "images = images.to(device, memory_format=torch.channels_last, non_blocking=True)",
        ),
    ),
)
