r"""The slow path for damaged JSON: one event at a time, repaired where that is possible, counted where it is not.

Seen in real files: Windows paths with single backslashes, raw control characters and bytes that are no text in frame
names, unescaped quotes, NaN and Infinity as Python, C and Windows write them, null events, commas too many or missing,
a key without its opening quote, an end cut off.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

_BOUNDARY = re.compile(rb'\}[\s,]*(?=\{\s*")|\}\s*,[\s,]*(?=null\b)|\bnull\s*,[\s,]*(?=\{|null\b)')
# A quote ends a string when what follows can follow a string; an unescaped quote inside a name is seldom so lucky.
_STRING = re.compile(
    r'"((?:[^"\\]|\\.|"(?!\s*(?:$|[}\]:]|,\s*(?:["{\[\-\d]|true|false|null|NaN|-?Infinity))))*)"', re.DOTALL
)
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_INNER_QUOTE = re.compile(r'(?<!\\)((?:\\\\)*)"')
_BACKSLASH = re.compile(r'\\(?!")')
# Outside strings JSON has no backslash: what begins with a quote and reaches one before the next quote is a string.
_STRING_BYTES = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)+"', re.DOTALL)
_BAD_ESCAPE_BYTES = re.compile(_BAD_ESCAPE.pattern.encode())
_BACKSLASH_BYTES = re.compile(_BACKSLASH.pattern.encode())
# In JSON whose strings are whole, what stands between them: numbers that are none, and commas before nothing.
_OUTSIDE = re.compile(r'"(?:[^"\\]|\\.)*"|[^"]+', re.DOTALL)
_NO_NUMBER = re.compile(
    r"(?<=[:\[,\s])[-+]?(?:nan(?:\([^)]*\))?|inf(?:inity)?|1\.#(?:INF|IND|QNAN|SNAN)\w*)(?=\s*(?:[,}\]]|$))",
    re.IGNORECASE,
)
_EXTRA_COMMA = re.compile(r"(?:,\s*)+(?=[}\]])|,\s*(?=,)")
_UNOPENED_KEY = re.compile(r'([{,]\s*)([A-Za-z_][A-Za-z_ ]*)"\s*:')


class Repairs:
    """Counts of what was repaired, by kind, and of what was given up."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.skipped = 0

    def merge(self, other: Repairs) -> None:
        """Add the counts of another part of the file."""
        self.counts.update(other.counts)
        self.skipped += other.skipped

    def load(self, raw: bytes) -> Any:
        """The value of one damaged piece of JSON, or None (counted as skipped) where no repair helps."""
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = raw.decode(errors="replace")
            self.counts["utf8"] += 1
        value = self._parse(text)
        if value is None:
            self.skipped += 1
        return value

    def _parse(self, text: str) -> Any:
        for repair in (_unchanged, _plain_numbers, _escape_strings, _open_keys):
            candidate, kinds = repair(text)
            for strict in (True, False):
                constants: list[str] = []  # NaN and Infinity; `append` gives null in their place
                try:
                    value = json.loads(candidate, strict=strict, parse_constant=constants.append)
                except (ValueError, RecursionError):
                    continue
                self.counts.update((*kinds, *["number"] * bool(constants), *["control"] * (not strict)))
                return value
        return None


def double_backslashes(block: bytes) -> tuple[bytes, int]:
    """A whole block with the backslashes of its wrongly escaped strings doubled, and how many strings those were.

    Traces from Windows have one in every event; to take those one by one costs forty times as much.
    """
    count = 0

    def fix(match: re.Match[bytes]) -> bytes:
        nonlocal count
        if not _BAD_ESCAPE_BYTES.search(match[0]):
            return match[0]
        count += 1
        return _BACKSLASH_BYTES.sub(rb"\\\\", match[0])

    return _STRING_BYTES.sub(fix, block), count


def _unchanged(text: str) -> tuple[str, tuple[str, ...]]:
    return text, ()


def _plain_numbers(text: str) -> tuple[str, tuple[str, ...]]:
    """Null for what JSON has no number for (`inf` as the bandwidth of a copy without length), and no stray commas."""
    kinds: set[str] = set()

    def null(match: re.Match[str]) -> str:
        kinds.add("number")
        return "null"

    def nothing(match: re.Match[str]) -> str:
        kinds.add("comma")
        return ""

    def fix(match: re.Match[str]) -> str:
        part = match[0]
        return part if part.startswith('"') else _EXTRA_COMMA.sub(nothing, _NO_NUMBER.sub(null, part))

    return _OUTSIDE.sub(fix, text), tuple(kinds)


def _escape_strings(text: str) -> tuple[str, tuple[str, ...]]:
    kinds: set[str] = set()

    def fix(match: re.Match[str]) -> str:
        body = match[1]
        if _BAD_ESCAPE.search(body):
            # In a string with one backslash that escapes nothing, none does: `\new` beside `\users` is a folder.
            kinds.add("escape")
            body = _BACKSLASH.sub(r"\\\\", body)
        if _INNER_QUOTE.search(body):
            kinds.add("quote")
            body = _INNER_QUOTE.sub(r'\1\\"', body)
        return f'"{body}"'

    fixed, others = _plain_numbers(_STRING.sub(fix, text))
    return fixed, (*kinds, *others)


def _open_keys(text: str) -> tuple[str, tuple[str, ...]]:
    fixed, kinds = _escape_strings(_UNOPENED_KEY.sub(r'\1"\2":', text))
    return fixed, (*kinds, "key")


def split_events(block: bytes) -> Iterator[bytes]:
    """The events of a damaged block, each as its own bytes, by the look of the boundaries between them."""
    start = 0
    for match in _BOUNDARY.finditer(block):
        end = match.start() + (1 if block[match.start() : match.start() + 1] == b"}" else 4)
        yield block[start:end].strip()
        start = match.end()
    last = block[start:].strip()
    if last:
        yield last


def split_tail(tail: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Every way to cut a file's end into (last event or nothing, footer), likeliest first."""
    stripped = tail.lstrip()
    if stripped.startswith(b"]"):
        yield b"", stripped[1:]
    for match in re.finditer(rb"[}l]\s*,?\s*(\])", tail):
        yield tail[: match.start() + 1], tail[match.end() :]
