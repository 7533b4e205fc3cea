"""Callbacks whose base class belongs to a library that is loaded when the first of them is made, not before."""

from __future__ import annotations

from typing import Any, ClassVar


class LateCallback:
    """A class whose instances are also instances of `library_bases()`, whatever that gives when they are made."""

    lent: ClassVar[tuple[str, ...]] = ()  # what the library sets for a run: bound methods of the user's model

    @classmethod
    def library_bases(cls) -> list[type]:
        """The library's own classes. Raises UsageError where there is none."""
        raise NotImplementedError

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance that the library takes for a callback of its own."""
        return object.__new__(_with(cls, cls.library_bases()))

    def __reduce__(self) -> Any:
        """What it was told and what a subclass added, not what it has seen of a run: a copy begins anew."""
        root = next(kind for kind in type(self).__mro__ if not vars(kind).get("_perfdoctor_made"))
        own = {name: value for name, value in self.__dict__.items() if name not in self.lent}
        return _made_again, (root,), {**own, **self.unseen()}

    def unseen(self) -> dict[str, Any]:
        """The attributes that a run changes, as they are before the first."""
        return {}


def _with(cls: type, bases: list[type]) -> type:
    missing = [base for base in bases if not issubclass(cls, base)]
    if not missing:
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls, *missing), {**names, "_perfdoctor_made": True})


def _made_again(cls: Any) -> Any:
    """Without `__init__`, as when anything is unpickled."""
    return cls.__new__(cls)
