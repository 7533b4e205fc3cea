"""Interned text: every distinct name of a recording once, and its index."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# A Windows path whose backslashes were written raw decodes without an error where they happen to begin valid escapes:
# `C:\new` becomes 'C:', newline, 'ew'. No real path has a control character behind the drive.
_DRIVE = re.compile(r"^[A-Za-z]:[\\/\b\f\n\r\t]")
_ESCAPES = str.maketrans({"\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t"})
_NOT_TEXT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def clean_name(text: str) -> str:
    """A name fit to print and to save: raw control characters and lone surrogates become U+FFFD."""
    if text.isprintable():
        return text
    if _DRIVE.match(text):
        text = text.translate(_ESCAPES)
    return _NOT_TEXT.sub("\ufffd", text)


class StringTable(dict[str, int]):
    """`table[name]` is the index of a name; unknown names are added, and what is no text is ''.

    A dict, so that a hit costs one C call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.strings: list[str] = []

    def __missing__(self, name: str) -> int:
        text = clean_name(name) if isinstance(name, str) else ""
        index = self.get(text)
        if index is None:
            index = len(self.strings)
            self.strings.append(text)
            super().__setitem__(text, index)
        super().__setitem__(name, index)
        return index

    def indices(self, names: Iterable[str], count: int) -> Ints:
        """The indices of `count` names, shape (count,)."""
        return np.fromiter(map(self.__getitem__, names), np.int64, count)
