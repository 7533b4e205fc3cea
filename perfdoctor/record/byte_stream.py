"""The bytes of a trace file, plain or gzip, as a stream of chunks. Nothing here holds more than a few chunks."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 1 << 19  # fits the cache, decoded; measured best of 256 kB to 2 MB
GZIP_MAGIC = b"\x1f\x8b"
_GZIP_READ_BYTES = 1 << 18
_GZIP_CHUNK_BYTES = 1 << 20  # inflating releases the GIL; much smaller ones would drown in hand-overs
_CHUNKS_AHEAD = 2


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
            for chunk in chunks:
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
            try:
                yield inflater.decompress(data, _GZIP_CHUNK_BYTES)
            except zlib.error as error:
                self.damage = f"gzip damaged near byte {file.tell()} ({error})"
                return
            inside, data = not inflater.eof, inflater.unconsumed_tail
            if inflater.eof:
                data = inflater.unused_data
                inflater = zlib.decompressobj(wbits=31)
        if inside:
            yield inflater.flush()
            self.damage = "" if inflater.eof else "gzip stream ends early"


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
