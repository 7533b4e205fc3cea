"""Attributes replaced for a while and put back on every way out, names imported earlier included."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """Replaced attributes, undone in reverse order by `undo`."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []
        self._calls: list[Callable[[], object]] = []
        self._renamed: list[tuple[dict[str, Any], str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name`; `undo` restores it, or removes it where the owner itself did not hold it."""
        self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def on_undo(self, call: Callable[[], object]) -> None:
        """Run `call` on the way out, before any attribute is put back."""
        self._calls.append(call)

    def rename_imports(self, replaced: dict[int, Any]) -> None:
        """Replace names that modules imported earlier (`from torch import randn`): id of the original -> stand-in."""
        for module in list(sys.modules.values()):
            namespace = getattr(module, "__dict__", None)
            if not isinstance(namespace, dict) or str(namespace.get("__name__", "")).startswith("perfdoctor."):
                continue
            for name, value in list(namespace.items()):
                stand_in = replaced.get(id(value))
                if stand_in is not None:
                    self._renamed.append((namespace, name, value))
                    namespace[name] = stand_in

    def undo(self) -> None:
        """Put everything back, also what follows a part that fails."""
        for call in reversed(self._calls):
            try:
                call()
            except Exception as error:
                sys.stderr.write(f"perfdoctor: could not undo part of the emulated device: {error}\n")
        for namespace, name, value in reversed(self._renamed):
            namespace[name] = value
        for owner, name, value in reversed(self._undo):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._calls.clear()
        self._renamed.clear()
        self._undo.clear()
