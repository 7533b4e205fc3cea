"""Callbacks whose base class belongs to a library that is loaded when the first of them is made, not before."""

from __future__ import annotations

from typing import Any


class LateCallback:
    """A class whose instances are also instances of `library_bases()`, whatever that gives when they are made."""

    @classmethod
    def library_bases(cls) -> list[type]:
        """The library's own classes. Raises UsageError where there is none."""
        raise NotImplementedError

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance that the library takes for a callback of its own."""
        return object.__new__(_with(cls, cls.library_bases()))

    def __reduce__(self) -> Any:
        root = next(kind for kind in type(self).__mro__ if not vars(kind).get("_perfdoctor_made"))
        return _made_again, (root,), self.__dict__


def _with(cls: type, bases: list[type]) -> type:
    missing = [base for base in bases if not issubclass(cls, base)]
    if not missing:
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls, *missing), {**names, "_perfdoctor_made": True})


def _made_again(cls: Any) -> Any:
    """Without `__init__`, as when anything is unpickled."""
    return cls.__new__(cls)
