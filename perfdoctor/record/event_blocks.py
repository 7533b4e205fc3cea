"""A trace file cut into blocks of whole events, without parsing it.

Separators between events are not uniform: Kineto's own layout changed, files are re-serialised with other indents or
none. A block is cut where an event begins: at the last `}, {"key"` whose key is the one that the file's first event
begins with (or another key that events begin with), whatever white space lies between.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# A list that is empty may be another key's, or an earlier one of two: it counts where no other follows.
_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[(?!\s*\])')
_EMPTY_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_ARRAY_BYTES = 200  # of the match of _ARRAY at most, for one that lies across two chunks
_FIRST_KEY = re.compile(rb'\s*(?:null\s*,\s*)*\{\s*("[^"\\]{1,40}")')
_BOUNDARY = re.compile(rb"\}\s*(,)\s*\{\s*$")
_BOUNDARY_BYTES = 400  # of white space at most between two events
_KEYS = (b'"ph"', b'"name"', b'"cat"', b'"pid"', b'"ts"', b'"args"', b'"id"', b'"tid"', b'"dur"')
_TRIES = 64  # occurrences of a key to look at before another key is tried
_HEADER_LIMIT = 64 << 20
_TAIL_LIMIT = 64 << 20


class EventBlocks:
    """Iterates over blocks: JSON lists of whole events, as bytes.

    `tail` is what no cut was found in: the last event, the end of the array and the footer. `header` is what stood
    before the array, its opening bracket included; `found` is False where there was no array of events.
    """

    def __init__(self, chunks: Iterator[bytes], *, inside: bool = False) -> None:
        """`inside`: the chunks begin behind the array's opening, with an event."""
        self.header = b""
        self.tail = b""
        self.found = inside
        self._chunks = chunks
        self._keys: tuple[bytes, ...] = _KEYS

    def __iter__(self) -> Iterator[bytes]:
        chunk = next(self._chunks, b"") if self.found else self._skip_header()
        if not self.found:
            return
        rest: list[bytes] = []
        while True:
            cut = last_boundary(chunk, self._keys)
            if cut < 0 and rest:  # the boundary may lie across the seam
                chunk, rest = b"".join((*rest, chunk)), []
                cut = last_boundary(chunk, self._keys)
            if cut >= 0:
                yield b"".join((b"[", *rest, memoryview(chunk)[:cut], b"]"))
                rest = [chunk[cut + 1 :]]
            else:
                rest = [chunk[:_TAIL_LIMIT]]  # a footer beyond that holds nothing that is read
            following = next(self._chunks, None)
            if following is None:
                break
            chunk = following
        self.tail = b"".join(rest)

    def _skip_header(self) -> bytes:
        buffer = bytearray(next(self._chunks, b""))
        start = _bare_list_start(buffer)
        searched = 0
        while start < 0:
            match = _ARRAY.search(buffer, searched)
            if match:
                start = match.end()
                break
            chunk = next(self._chunks, b"")
            if not chunk or len(buffer) > _HEADER_LIMIT:
                empty = _EMPTY_ARRAY.search(buffer)
                if empty:
                    start = empty.end()
                    break
                self.header = bytes(buffer)
                return b""
            searched = max(0, len(buffer) - _ARRAY_BYTES)
            buffer += chunk
        self.found, self.header = True, bytes(buffer[:start])
        self._learn_key(bytes(buffer[start : start + 4096]))
        return bytes(buffer[start:])

    def _learn_key(self, start: bytes) -> None:
        match = _FIRST_KEY.match(start)
        if match:
            self._keys = (match[1], *(key for key in _KEYS if key != match[1]))


def _bare_list_start(buffer: bytearray) -> int:
    """Where the events of a file that is a list begin; -1 for other files."""
    text = buffer.removeprefix(b"\xef\xbb\xbf").lstrip()
    return buffer.index(b"[") + 1 if text.startswith(b"[") else -1


def last_boundary(buffer: bytes, keys: tuple[bytes, ...] = _KEYS) -> int:
    """The index of the comma between the last two events that can be told apart; -1 where there is none."""
    for key in keys:
        position = len(buffer)
        for _ in range(_TRIES):
            position = buffer.rfind(key, 0, position)
            if position < 0:
                break
            match = _BOUNDARY.search(buffer, max(0, position - _BOUNDARY_BYTES), position)
            if match:
                return match.start(1)
    return -1
