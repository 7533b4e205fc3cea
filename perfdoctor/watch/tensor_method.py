"""A Python callable in the place of a tensor method, which passes for the method it stands for."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any


class TensorMethod:
    """Stands for `original` on torch.Tensor and calls `replacement(original, tensor, *args, **kwargs)`.

    It hashes and compares as the original: tensor subclasses look overrides up in tables keyed by the method, and
    torch hands them whatever stands on torch.Tensor. It binds to a method object with the original's name, which is
    what torch.compile takes a tensor method by, without a guard.
    """

    def __init__(self, original: Any, replacement: Callable[..., Any]) -> None:
        self.__name__ = original.__name__
        self.__qualname__ = original.__qualname__
        self.__doc__ = original.__doc__
        self.__wrapped__ = original
        self._replacement = replacement

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replacement(self.__wrapped__, *args, **kwargs)

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __eq__(self, other: object) -> bool:
        return self is other or bool(self.__wrapped__ == other)
