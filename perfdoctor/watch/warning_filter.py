"""Catch one text among all warnings of the process, before any filter, registry or handler of the user's sees it.

`torch.cuda.set_sync_debug_mode("warn")` reports each synchronising call through `PyErr_WarnEx`. The C code asks the
registry of the calling module, then the entries of `warnings.filters` in order, and calls the `match` method of each
entry's message. An entry that stands first and answers "ignore" therefore sees every warning, the registry is never
written, and user filters, `catch_warnings` and `showwarning` are never reached. To stay first, the list of filters
becomes a subclass of list that survives the copy `catch_warnings` makes (`filters[:]`) and keeps its first entry
when filters are inserted, removed or reset.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

Entry = tuple[Any, Any, Any, Any, int]


class WarningCatcher:
    """While installed, `caught(text)` is called for each warning that contains one of `markers`; it is dropped.

    `caught` may return False to let the warning pass on to the user's filters, and may raise: the error comes out of
    the call that warned.
    """

    def __init__(self, markers: tuple[str, ...], caught: Callable[[str], bool]) -> None:
        self._markers = markers
        self._caught = caught
        self._entry: Entry = ("ignore", self, Warning, None, 0)
        self._lists: weakref.WeakSet[_Filters] = weakref.WeakSet()
        self._original: list[Any] | None = None
        self._root: _Filters | None = None

    def match(self, text: str) -> bool:
        """Called by the interpreter for each warning, as the `match` of a compiled pattern."""
        for marker in self._markers:  # a loop: `any` over a generator costs 0.4 us more
            if marker in text:
                return self._caught(text)
        return False

    def install(self) -> None:
        """Stand first among the filters. Registries forget the marked text, else the interpreter would not ask."""
        self._original = warnings.filters  # type: ignore[assignment]
        self._root = _Filters(self._original or (), self)
        warnings.filters = self._root
        _forget(self._markers)

    def heal(self) -> None:
        """Stand first again if the user's code put another list in place. Cheap: once a step."""
        current: Any = warnings.filters
        if self._root is not None and not (isinstance(current, _Filters) and current.catcher is self):
            warnings.filters = _Filters(current, self)

    def remove(self) -> None:
        """Leave no trace: filters that the user added meanwhile stay, in the list object that was there before."""
        if self._root is None or self._original is None:
            return
        for filters in list(self._lists):
            filters.release()
        self._original[:] = self._root
        if warnings.filters is self._root:
            warnings.filters = self._original
        elif isinstance(warnings.filters, _Filters):
            warnings.filters = list(warnings.filters)
        self._root = self._original = None


class _Filters(list[Any]):
    """The filters with the catcher's entry first, whatever is done to them. A plain list once released."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # held in a WeakSet, by identity

    def __init__(self, entries: Iterable[Any], catcher: WarningCatcher) -> None:
        super().__init__(entries)
        self.catcher: WarningCatcher | None = catcher
        self._entry = catcher._entry
        catcher._lists.add(self)
        self._lead()

    def __eq__(self, other: object) -> bool:
        return list.__eq__(self, other) is True

    def release(self) -> None:
        """Become an ordinary list without the entry."""
        self.catcher = None
        while self._entry in self:
            super().remove(self._entry)

    def _lead(self) -> None:
        if self.catcher is None or (len(self) and self[0] is self._entry):
            return
        while self._entry in self:
            super().remove(self._entry)
        super().insert(0, self._entry)

    def copy(self) -> list[Any]:
        return _Filters(self, self.catcher) if self.catcher is not None else list(self)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and self.catcher is not None:
            return _Filters(super().__getitem__(index), self.catcher)
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value)
        self._lead()

    def __delitem__(self, index: Any) -> None:
        super().__delitem__(index)
        self._lead()

    def insert(self, index: SupportsIndex, entry: Any) -> None:
        super().insert(index, entry)
        self._lead()

    def remove(self, entry: Any) -> None:
        super().remove(entry)
        self._lead()

    def pop(self, index: SupportsIndex = -1) -> Any:
        entry = super().pop(index)
        self._lead()
        return entry

    def clear(self) -> None:
        super().clear()
        self._lead()

    def sort(self, **options: Any) -> None:
        super().sort(**options)
        self._lead()

    def reverse(self) -> None:
        super().reverse()
        self._lead()

    def __iadd__(self, entries: Iterable[Any]) -> Any:  # type: ignore[override,misc]
        super().extend(entries)
        self._lead()
        return self


def _forget(markers: tuple[str, ...]) -> None:
    for module in list(sys.modules.values()):
        registry = getattr(module, "__dict__", {}).get("__warningregistry__")
        if isinstance(registry, dict):
            for key in [key for key in registry if isinstance(key, tuple)]:
                if any(marker in str(key[0]) for marker in markers):
                    del registry[key]
