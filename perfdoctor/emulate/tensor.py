"""A tensor in name only on the device: real CPU memory, a class that says cuda:0, every op seen on its way.

The class carries torch's Python dispatch key, so autograd, optimizers and hooks run as on any tensor while each op
below autograd passes `dispatch.run`. Memory is shared with the plain tensor it was made from, never copied here.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import FrameType
from typing import Any

import torch

from perfdoctor.emulate import border
from perfdoctor.emulate.dispatch import run
from perfdoctor.emulate.storage_marks import mark_device
from perfdoctor.record.call_site import user_frame
from perfdoctor.record.instruction import called_name

CUDA = torch.device("cuda", 0)
_no_dispatch = torch._C._DisableTorchDispatch  # type: ignore[attr-defined]
_make = torch.Tensor._make_subclass  # type: ignore[attr-defined]
_bool = torch.Tensor.__bool__
_grad: Any = torch._C.TensorBase.grad


class CudaTensor(torch.Tensor):
    """A tensor of the emulated device.

    It must not define `__getitem__`: to C code that makes it a sequence, and `torch.tensor([a, b])` asks for lengths.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(cls, func, args, kwargs)

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradient. Where C++ made one of zeros on the backend's device, it is taken over here, once."""
        held: torch.Tensor | None = _grad.__get__(self)
        if type(held) is torch.Tensor:
            held = adopt(held.clone() if held._is_zerotensor() else held)  # type: ignore[no-untyped-call]
            _grad.__set__(self, held)
        return held

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _grad.__set__(self, None)

    def get_device(self) -> int:
        return 0

    def is_pinned(self, device: Any = None) -> bool:
        return False

    # Reads: each is one crossing, whatever ops the CPU path runs for it.

    def __bool__(self) -> bool:
        before = border.hint("tensor_to_bool")
        try:
            return _bool(self)
        finally:
            border.hint(before)

    def tolist(self) -> Any:
        if self.numel():
            border.cross("tolist")
        return plain(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        border.cross("numpy")
        return plain(self).clone().numpy(force=True)

    def __format__(self, spec: str) -> str:
        if self.dim() == 0 and not self.is_complex():
            border.cross("format_tensor")
            return format(plain(self).item(), spec)
        if spec:
            return object.__format__(self, spec)
        border.cross("format_tensor")
        with border.quiet():
            return repr(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        caller = user_frame(sys._getframe(1))
        printed = caller is not None and called_name(caller) == "print"
        border.cross("print_tensor" if printed else "format_tensor")
        with border.quiet():
            return _described(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment"
            )
        import copy

        twin = adopt(plain(self).clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = twin
        if self.grad is not None:
            twin.grad = copy.deepcopy(self.grad, memo)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce_ex__(self, proto: Any) -> Any:
        if not _is_shallow_copy(sys._getframe(1)):
            border.cross("save")
        if getattr(self, "_is_param", False):
            data = self.detach()
            data.__dict__.pop("_is_param", None)
            return torch._utils._rebuild_parameter, (data, self.requires_grad, OrderedDict())
        bare = plain(self)
        mark_device(bare.untyped_storage())
        bare.requires_grad_(self.requires_grad and self.is_leaf)
        return torch.Tensor._reduce_ex_internal(bare, proto)  # type: ignore[no-untyped-call]

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise BufferError("the emulated CUDA device has no device memory to hand to another library")

    @property
    def __cuda_array_interface__(self) -> Any:
        raise AttributeError("the emulated CUDA device has no device memory to hand to another library")

    def record_stream(self, stream: Any) -> None:
        """Memory is not reused across streams here."""

    def share_memory_(self) -> Any:
        return self


def adopt(host: torch.Tensor, requires_grad: bool | None = None) -> Any:
    """The device tensor over the memory of `host`, a leaf."""
    return _make(CudaTensor, host, host.requires_grad if requires_grad is None else requires_grad)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The host tensor over the memory of a device tensor, outside autograd."""
    with torch.no_grad(), _no_dispatch():
        return tensor.detach()


def _is_shallow_copy(caller: FrameType) -> bool:
    """`copy.copy` pickles, and shares the memory."""
    return caller.f_globals.get("__name__") == "copy" and caller.f_code.co_name == "copy"


def _described(tensor: CudaTensor) -> str:
    bare = plain(tensor)
    text: str = bare.__repr__()  # type: ignore[no-untyped-call]
    extra = ", device='cuda:0'"
    at = text.rfind(", dtype=")
    text = text[:at] + extra + text[at:] if at > text.rfind("]") and at != -1 else text[:-1] + extra + ")"
    if tensor.grad_fn is not None:
        text = f"{text[:-1]}, grad_fn=<{type(tensor.grad_fn).__name__}>)"
    elif tensor.requires_grad:
        text = text[:-1] + ", requires_grad=True)"
    return "Parameter containing:\n" + text if getattr(tensor, "_is_param", False) else text
