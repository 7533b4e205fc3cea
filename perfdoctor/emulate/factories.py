"""Functions that make tensors on a device they are told: `torch.randn(..., device="cuda")` and the like.

Random numbers come from the CPU generator, so a loop sees the numbers of a plain CPU run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _foreach_utils
from torch.utils._device import DeviceContext, _device_constructors

from perfdoctor.emulate import border
from perfdoctor.emulate.patches import Patches
from perfdoctor.emulate.storage_marks import mark_pinned
from perfdoctor.emulate.tensor import CUDA, CudaTensor, adopt, plain
from perfdoctor.emulate.transfers import carried, is_cuda

_LIKE = ["zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"]
_NEW = ["new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"]
_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray)
_CONSTRUCTORS: frozenset[Any] = frozenset(_device_constructors())
_find_builtin = torch.jit._builtins._find_builtin


def install(patches: Patches) -> None:
    """Replace the factories until `patches` is undone."""
    replaced: dict[int, Any] = {}

    def replace(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        stand_in = functools.wraps(original)(functools.partial(wrapper, original))
        replaced[id(original)] = stand_in
        patches.set(owner, name, stand_in)

    for function in _CONSTRUCTORS:
        name = str(getattr(function, "__name__", ""))
        for owner in (torch, torch.fft):
            if getattr(owner, name, None) is function:
                replace(owner, name, _from_host if function in _FROM_HOST else _made)
    for name in (*_LIKE, "normal"):
        replace(torch, name, _made_like if name in _LIKE else _made)
    replace(torch.nn.functional, "one_hot", _one_hot)
    for name in ("quantile", "nanquantile"):
        replace(torch, name, _without_host_checks)
    for name in ("svdvals", "eigvalsh", "cond", "matrix_rank"):
        replace(torch.linalg, name, _host_memory)
    replace(torch._VF, "_pad_packed_sequence", _padded)
    replace(torch._C._nn, "pad_sequence", _sequences_padded)
    replace(torch, "where", _where)
    patches.set(torch.Tensor, "where", _where_method)
    replace(_foreach_utils, "_group_tensors_by_device_and_dtype", _grouped)
    for name in _NEW:
        patches.set(torch.Tensor, name, _method(getattr(torch._C.TensorBase, name)))
    patches.set(torch.Tensor, "new_tensor", _new_tensor_method)
    patches.set(DeviceContext, "__torch_function__", _in_device_context)
    patches.set(torch.jit._builtins, "_find_builtin", _find_original_builtin)
    patches.rename_imports(replaced)


def _find_original_builtin(function: Any) -> Any:
    """torch.jit looks builtins up by identity."""
    return _find_builtin(  # type: ignore[no-untyped-call]
        function.args[0] if isinstance(function, functools.partial) else function
    )


def _made(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A factory that fills on the device: nothing crosses the border."""
    on_device = is_cuda(kwargs.get("device"))
    if not on_device and "pin_memory" not in kwargs:
        return original(*args, **kwargs)
    pinned = kwargs.pop("pin_memory", False)
    if on_device:
        kwargs["device"] = "cpu"
        return adopt(original(*args, **kwargs))
    out = original(*args, **kwargs)
    return mark_pinned(out) if pinned else out


def _from_host(original: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.tensor, torch.as_tensor, torch.asarray: values come from the host."""
    pinned = kwargs.pop("pin_memory", False)
    device = kwargs.get("device", args[1] if len(args) > 1 and original is torch.as_tensor else None)
    if isinstance(data, torch.Tensor):
        return _from_tensor(original, data, device, args, kwargs)
    for _ in range(_device_scalars(data)):
        border.cross("item")
    if not is_cuda(device):
        out = original(data, *args, **kwargs)
        return mark_pinned(out) if pinned else out
    kwargs["device"] = "cpu"
    host = original(data, *args[:1], **kwargs)
    if host.numel():
        border.cross(
            "h2d_pageable" if type(data).__module__ == "numpy" and original not in _FROM_HOST[:1] else "h2d_blocking"
        )
    return adopt(host.clone() if host.untyped_storage().resizable() is False else host)


def _device_scalars(data: Any) -> int:
    """How many device scalars a nested list holds, judged by its first: each is read on its own."""
    leaf = data
    while isinstance(leaf, (list, tuple)) and leaf:
        leaf = leaf[0]
    if not isinstance(leaf, CudaTensor):
        return 0
    if isinstance(data, (list, tuple)):
        return sum(_device_scalars(item) for item in data)
    return int(data.numel())


def _from_tensor(original: Any, data: torch.Tensor, device: Any, args: Any, kwargs: Any) -> Any:
    copy = original is _FROM_HOST[0] or bool(kwargs.get("copy"))
    dtype = kwargs.get("dtype") or (args[0] if args else None)
    source = data.detach() if original is _FROM_HOST[0] else data
    target = data.device if device is None else device
    out = source.to(target, dtype) if dtype is not None else source.to(target)
    out = out.clone() if copy and out.data_ptr() == data.data_ptr() else out
    return out.requires_grad_() if kwargs.get("requires_grad") else out


def _made_like(original: Any, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.pop("device", None)
    pinned = kwargs.pop("pin_memory", False)
    here = isinstance(source, CudaTensor)
    there = here if device is None else is_cuda(device)
    if here == there:
        out = original(source, *args, **kwargs)
    else:
        requires_grad = kwargs.get("requires_grad", False)
        out = original(plain(source) if here else source.detach(), *args, **kwargs)
        out = adopt(out, requires_grad) if there else out
    return mark_pinned(out) if pinned and not there else out


def _method(original: Any) -> Any:
    @functools.wraps(original)
    def made(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return _made_like(original, self, *args, **kwargs)

    return made


def _new_tensor_method(self: torch.Tensor, data: Any, **kwargs: Any) -> Any:
    kwargs.setdefault("device", self.device)
    kwargs.setdefault("dtype", self.dtype)
    return torch.tensor(data, **kwargs)


def _one_hot(original: Any, tensor: torch.Tensor, num_classes: int = -1) -> Any:
    """CUDA reads the values only where it must find the number of classes; the CPU checks them always."""
    if not isinstance(tensor, CudaTensor):
        return original(tensor, num_classes)
    if num_classes == -1:
        border.cross("one_hot")
    with border.quiet():
        return adopt(original(plain(tensor), num_classes))


def _host_memory(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """ATen computes more for tensor subclasses (vectors beside values) and rounds otherwise: give it plain memory."""
    if not isinstance(tensor, CudaTensor) or (tensor.requires_grad and torch.is_grad_enabled()):
        return original(tensor, *args, **kwargs)
    border.cross("linalg_check")
    return adopt(original(plain(tensor), *args, **kwargs))


def _padded(original: Any, data: torch.Tensor, *args: Any) -> Any:
    """`pad_packed_sequence` fills a buffer that C++ makes on the backend's device."""
    with border.quiet():
        out, lengths = original(data, *args)
    return (carried(out) if isinstance(data, CudaTensor) else out), lengths


def _sequences_padded(
    original: Any, sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Any:
    """`pad_sequence` too fills a buffer that C++ makes on the backend's device: here it is made on the sequences'."""
    if not any(isinstance(sequence, CudaTensor) for sequence in sequences):
        return original(sequences, batch_first, padding_value, padding_side)
    length = max(len(sequence) for sequence in sequences)
    out = sequences[0].new_full((len(sequences), length, *sequences[0].shape[1:]), padding_value)
    for row, sequence in enumerate(sequences):
        start = length - len(sequence) if padding_side == "left" else 0
        out.select(0, row).narrow(0, start, len(sequence)).copy_(sequence)
    return out if batch_first else out.transpose(0, 1).contiguous()


def _where(original: Any, condition: Any, *args: Any, **kwargs: Any) -> Any:
    """CUDA takes a host scalar tensor among device tensors, and copies it; below here it looks like a number."""
    given = [value for value in (condition, *args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if any(isinstance(value, CudaTensor) for value in given):
        for value in given:
            if not isinstance(value, CudaTensor) and value.dim() == 0:
                border.cross("h2d_blocking")
    return original(condition, *args, **kwargs)


_tensor_where = torch.Tensor.where


@functools.wraps(_tensor_where)
def _where_method(self: torch.Tensor, condition: Any, other: Any) -> Any:
    return _where(torch._C.TensorBase.where, self, condition, other)


def _without_host_checks(original: Any, *args: Any, **kwargs: Any) -> Any:
    with border.quiet():
        return original(*args, **kwargs)


def _grouped(original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """C++ names the groups by the backend's device: name those of device tensors by theirs."""
    groups = original(tensors, *args, **kwargs)

    def device(key: Any, members: Any) -> Any:
        return CUDA if any(isinstance(member, CudaTensor) for member in members[0]) else key[0]

    return {(device(key, value[0]), *key[1:]): value for key, value in groups.items()}


def _in_device_context(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """`with torch.device("cuda")` and torch.set_default_device, which act below the replaced names."""
    kwargs = dict(kwargs or {})
    if func in _CONSTRUCTORS and kwargs.get("device") is None:
        kwargs["device"] = self.device
        return (_from_host if func in _FROM_HOST else _made)(func, *args, **kwargs)
    return func(*args, **kwargs)
