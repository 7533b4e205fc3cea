"""The bytes of a trace file as a stream of chunks: plain or gzip, in UTF-8 whatever they were written in.

Nothing here holds more than a few chunks.
"""

from __future__ import annotations

import codecs
import queue
import threading
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 1 << 19  # fits the cache, decoded; measured best of 256 kB to 2 MB
GZIP_MAGIC = b"\x1f\x8b"
_GZIP_READ_BYTES = 1 << 18
_GZIP_CHUNK_BYTES = 1 << 20  # inflating releases the GIL; much smaller ones would drown in hand-overs
_CHUNKS_AHEAD = 2
# Windows' shells redirect output as UTF-16. Without a mark, the zero bytes beside an opening bracket tell.
_MARKS = (
    (b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"),
    (b"{\0\0\0", "utf-32-le"), (b"[\0\0\0", "utf-32-le"), (b"\0\0\0{", "utf-32-be"), (b"\0\0\0[", "utf-32-be"),
    (b"{\0", "utf-16-le"), (b"[\0", "utf-16-le"), (b"\0{", "utf-16-be"), (b"\0[", "utf-16-be"),
)  # fmt: skip


def text_encoding(head: bytes) -> str | None:
    """The encoding of a text that begins with these bytes, where it is a wide one; None for UTF-8."""
    return next((name for mark, name in _MARKS if head.startswith(mark)), None)


def as_utf8(head: bytes) -> bytes:
    """The beginning of a text in UTF-8, without the mark of its byte order. A cut last character becomes U+FFFD."""
    encoding = text_encoding(head)
    text = head if encoding is None else head.decode(encoding, errors="replace").encode(errors="replace")
    return text.removeprefix(codecs.BOM_UTF8)


class ByteStream:
    """Chunks of a file, gunzipped where it is gzip. `damage` says, after the iteration, how the stream ended early."""

    def __init__(self, path: Path, start: int = 0, end: int | None = None) -> None:
        """`start` and `end` pick a part of a plain file, in bytes."""
        self.path = path
        self._range = (start, path.stat().st_size if end is None else end)
        self.damage = ""
        self.num_bytes = 0  # given out, uncompressed
        self.fraction = 0.0  # of the file that was read

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            compressed = file.read(2) == GZIP_MAGIC
            file.seek(self._range[0])
            chunks = _read_ahead(self._inflated(file)) if compressed else self._plain(file)
            for chunk in chunks if self._range[0] else _in_utf8(chunks):
                self.num_bytes += len(chunk)
                for start in range(0, len(chunk), CHUNK_BYTES):
                    yield chunk[start : start + CHUNK_BYTES]

    def _plain(self, file: BinaryIO) -> Iterator[bytes]:
        left = self._range[1] - self._range[0]
        while left > 0 and (chunk := file.read(min(CHUNK_BYTES, left))):
            left -= len(chunk)
            self.fraction = 1.0 - left / (self._range[1] - self._range[0])
            yield chunk

    def _inflated(self, file: BinaryIO) -> Iterator[bytes]:
        """The members of a gzip file, one after the other. Damage ends the stream; what came before it counts."""
        inflater, inside, data = zlib.decompressobj(wbits=31), False, b""
        while data := data or file.read(_GZIP_READ_BYTES):
            self.fraction = min(1.0, file.tell() / max(1, self._range[1]))
            if not inside and not data.startswith(GZIP_MAGIC[: len(data)]):
                break  # padding or junk behind the last member, which gzip ignores too
            before = inflater.copy()
            try:
                yield inflater.decompress(data, _GZIP_CHUNK_BYTES)
            except zlib.error as error:
                yield _salvaged(before, data)
                self.damage = f"gzip damaged near byte {file.tell()} ({error})"
                return
            inside, data = not inflater.eof, inflater.unconsumed_tail
            if inflater.eof:
                data = inflater.unused_data
                inflater = zlib.decompressobj(wbits=31)
        if inside:
            yield inflater.flush()
            self.damage = "" if inflater.eof else "gzip stream ends early"


def _salvaged(inflater: zlib._Decompress, data: bytes) -> bytes:
    """What can be inflated before the damage: zlib gives nothing of a piece that has an error anywhere in it."""
    parts: list[bytes] = []
    for place in range(len(data)):
        try:
            parts.append(inflater.decompress(data[place : place + 1]))
        except zlib.error:
            break
    return b"".join(parts)


def _in_utf8(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same text in UTF-8. A character that is none becomes U+FFFD."""
    first = next(chunks, b"")
    encoding = text_encoding(first)
    if encoding is None:
        yield first
        yield from chunks
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    for chunk in chain((first,), chunks):
        yield decoder.decode(chunk).encode(errors="replace")
    yield decoder.decode(b"", final=True).encode(errors="replace")


def _read_ahead(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same chunks, made by a thread that works ahead. The thread ends with the iteration, however that ends."""
    ready: queue.Queue[bytes | BaseException | None] = queue.Queue(_CHUNKS_AHEAD)
    stopped = threading.Event()

    def put(item: bytes | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            if all(put(chunk) for chunk in chunks if chunk):
                put(None)
        except BaseException as error:  # raised again where the chunks are read
            put(error)

    worker = threading.Thread(target=work, name="perfdoctor-inflate", daemon=True)
    worker.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        worker.join()
