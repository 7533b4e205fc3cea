"""Devices named by a bare number: `model.to(rank)`, `torch.device(0)`. Without CUDA, torch has no device for them.

`torch.device` is a C type that cannot be taught: a class stands in its place, makes real devices and owns them to
`isinstance`.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch

from perfdoctor.emulate.patches import Patches

_Device = torch.device
_parse_to = torch._C._nn._parse_to  # type: ignore[attr-defined]


class _DeviceType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Device)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Device) or type.__subclasscheck__(cls, subclass)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _Device

    def __hash__(cls) -> int:
        return hash(_Device)


class device(metaclass=_DeviceType):
    """`torch.device`, for which a number is one of a CUDA device."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _Device(*_named(args), **kwargs)


device.__module__ = "torch"  # pickle looks it up by that name


def install(patches: Patches) -> None:
    """Take numbers for CUDA devices until `patches` is undone."""
    patches.set(torch, "device", device)
    patches.set(torch._C._nn, "_parse_to", _parse_numbers)
    # A device pickles as a call of its type, and pickle insists on finding that very type under its name.
    copyreg.pickle(_Device, lambda named: (torch.device, (named.type, named.index)[: 1 + (named.index is not None)]))
    patches.on_undo(lambda: copyreg.dispatch_table.pop(_Device, None))


def _named(args: tuple[Any, ...]) -> tuple[Any, ...]:
    number = bool(args) and isinstance(args[0], int) and not isinstance(args[0], bool)
    return (_Device("cuda", args[0]), *args[1:]) if number else args


def _parse_numbers(*args: Any, **kwargs: Any) -> Any:
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = _Device("cuda", kwargs["device"])
    return _parse_to(*_named(args), **kwargs)
