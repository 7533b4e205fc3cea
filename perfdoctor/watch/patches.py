"""Replaced attributes, put back in reverse order."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """Attributes replaced on modules and classes until `undo`.

    An attribute that somebody replaced again meanwhile is left as it is: taking theirs away would be worse than
    leaving our wrapper underneath, which does nothing once its session is over.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, object, object]] = []

    def replace(self, owner: Any, name: str, value: object) -> None:
        """Set `owner.name`, remembering what its own namespace held (an inherited attribute is uncovered again)."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._replaced.append((owner, name, before, value))

    def undo(self) -> None:
        """Put everything back. Safe to call twice."""
        while self._replaced:
            owner, name, before, value = self._replaced.pop()
            if vars(owner).get(name) is not value:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def __bool__(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._replaced)
