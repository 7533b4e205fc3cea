"""Tensors that cross the border because the user says so: `.to`, `.cuda`, `.cpu`, `.pin_memory`, `.data =`, `type_as`.

These replace methods of torch.Tensor while an emulated device is open, and serve host and device tensors alike.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from perfdoctor.emulate import border
from perfdoctor.emulate.arrivals import start_copy
from perfdoctor.emulate.lazy import is_lazy, note_move
from perfdoctor.emulate.source import makes_source
from perfdoctor.emulate.storage_marks import is_pinned, mark_pinned
from perfdoctor.emulate.sync_rules import h2d_kind, has_elements
from perfdoctor.emulate.tensor import CUDA, CudaTensor, adopt, plain

_Base = torch._C.TensorBase
_to, _type = _Base.to, _Base.type
_data: Any = torch._C.TensorBase.data
_swap = torch._C._swap_tensor_impl  # type: ignore[attr-defined]


def is_cuda(device: Any) -> bool:
    """Whether a `device=` argument names the emulated device.

    Raises:
        RuntimeError: it names a second one.
    """
    if device is None:
        return False
    if type(device) is str:
        if not device.startswith("cuda"):
            return False
        device = torch.device(device)
    if type(device) is int:
        device = torch.device("cuda", device)
    if getattr(device, "type", None) != "cuda":
        return False
    if device.index not in (None, 0):
        raise RuntimeError(
            f"CUDA error: invalid device ordinal ({device}; the emulated machine has one device, cuda:0)"
        )
    return True


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, host: torch.Tensor) -> Any:
        return adopt(_copied(host.detach()), False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        # Not recorded: which of these copies C++ asked for and which the user cannot be told apart here.
        return plain(grad).clone() if isinstance(grad, CudaTensor) else grad


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Any:
        return _copied(plain(tensor))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        border.cross("h2d_pageable")
        return adopt(grad.detach().clone(), False)


def to_device(host: torch.Tensor, non_blocking: bool, fresh: bool) -> Any:
    """Copy a host tensor to the device; differentiable."""
    kind = h2d_kind(host, non_blocking, fresh)
    if kind is not None:
        border.cross(kind)
    return carried(host)


def carried(host: torch.Tensor) -> Any:
    """A copy of a host tensor as a device tensor; differentiable, and nothing is recorded."""
    if host.requires_grad and torch.is_grad_enabled():
        return _ToDevice.apply(host)  # type: ignore[no-untyped-call]
    return adopt(_copied(host.detach()), False)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    # Memory formats are for strided tensors alone.
    return tensor.clone(memory_format=torch.preserve_format) if tensor.layout is torch.strided else tensor.clone()


def to_host(tensor: torch.Tensor, non_blocking: bool = False) -> Any:
    """Copy a device tensor to the host; differentiable. A non-blocking copy lands in pinned memory."""
    if not non_blocking and has_elements(tensor):
        border.cross("cpu")
    if tensor.requires_grad and torch.is_grad_enabled():
        out: torch.Tensor = _ToHost.apply(tensor)  # type: ignore[no-untyped-call]
    else:
        out = _copied(plain(tensor))
    if non_blocking:
        mark_pinned(out)
        start_copy(out)
    return out


def _is_temporary(tensor: torch.Tensor, held: int, frame: FrameType) -> bool:
    # `sys.getrefcount` in the replaced method tells `make().to(d)` from `x.to(d)`. A batch out of a loader may be a
    # temporary too: the expression must show a factory; where there is no source, memory of its own must do.
    if held > _held_as_temporary() or tensor.layout is not torch.strided:
        return False
    made = makes_source(frame)
    return made if made is not None else not tensor._is_view() and tensor.untyped_storage().resizable()


def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.to` with the emulated device known."""
    held = sys.getrefcount(self)
    device, dtype, non_blocking, copy, rest = _parsed(args, kwargs)
    if device is None:
        return _to(self, *args, **kwargs)
    here = isinstance(self, CudaTensor)
    there = is_cuda(device)
    if is_lazy(self):
        return note_move(self, there)
    if here == there:
        if not there:
            return _to(self, *args, **kwargs)
        return _to(self, dtype=dtype or self.dtype, copy=copy, **rest)
    if there:
        source = _to(self, dtype=dtype) if dtype is not None and dtype != self.dtype else self
        moved = to_device(source, non_blocking, _is_temporary(self, held, sys._getframe(1)))
    else:
        if torch.device(device).type != "cpu":
            return _to(self, *args, **kwargs)
        source = _to(self, dtype=dtype) if dtype is not None and dtype != self.dtype else self
        moved = to_host(source, non_blocking)
    return _to(moved, **rest) if rest else moved


def _parsed(args: Any, kwargs: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    """(device, dtype, non_blocking, copy, {memory_format}) of the three overloads of `Tensor.to`."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    non_blocking, copy = kwargs.get("non_blocking", False), kwargs.get("copy", False)
    other = args[0] if args else kwargs.get("other")
    flags = args[1:]
    if isinstance(other, torch.Tensor):
        device, dtype = other.device, other.dtype
    elif isinstance(other, torch.dtype):
        dtype = other
    elif other is not None or (args and len(args) > 1):
        device = other
        if flags and (isinstance(flags[0], torch.dtype) or flags[0] is None):
            dtype, flags = flags[0] or dtype, flags[1:]
    if flags:
        non_blocking = flags[0]
    if len(flags) > 1:
        copy = flags[1]
    memory_format = kwargs.get("memory_format")
    return (
        device,
        dtype,
        bool(non_blocking),
        bool(copy),
        {} if memory_format is None else {"memory_format": memory_format},
    )


def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
    """`Tensor.cuda`."""
    held = sys.getrefcount(self)
    is_cuda(0 if device is None else device)
    if isinstance(self, CudaTensor):
        return self
    if is_lazy(self):
        return note_move(self, True)
    moved = to_device(self, non_blocking, _is_temporary(self, held, sys._getframe(1)))
    return moved if memory_format is None else _to(moved, memory_format=memory_format)


def cpu(self: torch.Tensor, memory_format: Any = None) -> Any:
    """`Tensor.cpu`."""
    moved = to_host(self) if isinstance(self, CudaTensor) else self
    return moved if memory_format is None else _to(moved, memory_format=memory_format)


def pin_memory(self: torch.Tensor, device: Any = None) -> Any:
    """`Tensor.pin_memory`: a page-locked copy, the tensor itself where it is one."""
    if isinstance(self, CudaTensor):
        raise RuntimeError(f"cannot pin 'torch.cuda.{_type_name(self)}' only dense CPU tensors can be pinned")
    return self if is_pinned(self) else mark_pinned(self.clone(memory_format=torch.preserve_format))


def is_pinned_method(self: torch.Tensor, device: Any = None) -> bool:
    """`Tensor.is_pinned`."""
    return not isinstance(self, CudaTensor) and is_pinned(self)


def type_as(self: torch.Tensor, other: torch.Tensor) -> Any:
    """`Tensor.type_as`."""
    return self.to(other.device, other.dtype)


def type_method(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """`Tensor.type`, asked or told."""
    if dtype is None:
        name = _type(self)
        return name.replace("torch.", "torch.cuda.") if isinstance(self, CudaTensor) else name
    text = dtype if isinstance(dtype, str) else f"{getattr(dtype, '__module__', '')}.{getattr(dtype, '__name__', '')}"
    if isinstance(dtype, torch.dtype):
        return self.to(dtype, non_blocking=non_blocking)
    target = _type(torch.empty(0), text.replace("torch.cuda.", "torch.")).dtype
    return self.to("cuda" if "cuda" in text else "cpu", target, non_blocking)


def _type_name(tensor: torch.Tensor) -> str:
    return str(_type(tensor)).rsplit(".", 1)[-1]


def _set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(self, CudaTensor) == isinstance(value, CudaTensor):
        _data.__set__(self, value)
    else:
        become(self, value)


data = property(lambda self: _data.__get__(self), _set_data)


def become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let the very object `tensor` hold `value` of the other side, as `module.to` does with parameters."""
    grad = tensor.grad
    parameter = isinstance(tensor, torch.nn.Parameter)
    requires_grad = tensor.requires_grad
    with torch.no_grad():
        tensor.grad = None
        twin = value.detach()
    if twin.is_floating_point() or twin.is_complex():
        twin.requires_grad_(requires_grad)
    _swap(tensor, twin)
    if isinstance(value, CudaTensor):
        tensor.__class__ = CudaTensor
        if parameter:
            tensor._is_param = True  # type: ignore[attr-defined]
    else:
        tensor.__dict__.pop("_is_param", None)
        tensor.__class__ = torch.nn.Parameter if parameter else torch.Tensor
    twin.__class__ = torch.Tensor if isinstance(value, CudaTensor) else CudaTensor
    if grad is not None:
        with border.quiet():  # `module.to` moves the gradient itself, after this
            tensor.grad = grad.to(tensor.device)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # C++ knows hooks from the dict's assignment on
        if hooks := getattr(tensor, name, None):
            setattr(tensor, name, hooks)


class _Probe:
    """Called like `to`, it says how often a temporary is held there."""

    def to(self, *args: Any, **kwargs: Any) -> int:
        return sys.getrefcount(self)


def _held_as_temporary() -> int:
    """What sys.getrefcount shows for a temporary in a method called like `to`; 0 where a variable shows the same.

    Asked each time: once torch.compile has traced anything, Python's calls hold their arguments once more.
    """
    held = _Probe()
    temporary = _Probe().to("cuda")
    return temporary if held.to("cuda") > temporary else 0


METHODS: dict[str, Any] = {
    "to": to, "cuda": cuda, "cpu": cpu, "pin_memory": pin_memory, "is_pinned": is_pinned_method, "type_as": type_as,
    "type": type_method, "data": data,
}  # fmt: skip
__all__ = ["CUDA", "METHODS", "become", "is_cuda", "to_device", "to_host"]
