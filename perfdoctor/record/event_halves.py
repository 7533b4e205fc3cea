"""The events of a file, read by two processes where the file is large, plain and there are two cores.

Parsing holds the GIL, so a thread would not help. On a 1 GB trace two processes halve the wall time.
Run as `python -m perfdoctor.record.event_halves PATH START`, this module is the second process: it writes what it read
to its standard output.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from perfdoctor.record.byte_stream import GZIP_MAGIC, ByteStream, text_encoding
from perfdoctor.record.event_blocks import EventBlocks, last_boundary
from perfdoctor.record.event_columns import EventColumns

Progress = Callable[[float], None]

SPLIT_BYTES = 200_000_000  # below, starting a process costs more than it gives
_SEARCH_BYTES = 4 << 20


def read_events(
    path: Path, progress: Progress | None = None, split_bytes: int = SPLIT_BYTES
) -> tuple[ByteStream, EventBlocks, EventColumns]:
    """The stream, the blocks (their tail not yet read) and the columns of a file.

    `progress` is called with the fraction done, 0 to 1, every few milliseconds.
    """
    middle = _middle(path, split_bytes)
    if middle is None:
        return _read(path, 0, None, progress)
    command = [sys.executable, "-m", "perfdoctor.record.event_halves", str(path.absolute()), str(middle + 1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()) as second:
        try:
            stream, blocks, events = _read(path, 0, middle, progress)
            if not blocks.found:
                return stream, blocks, events
            events.add_block(b"[%b]" % blocks.tail)
            assert second.stdout is not None
            try:
                tail, part = pickle.load(second.stdout)
            except (EOFError, pickle.UnpicklingError):
                _, rest, others = _read(path, middle + 1, None, progress)
                tail, part = rest.tail, others.part()
        finally:
            second.kill()  # no harm to one that has ended
    events.merge(part)
    blocks.tail = tail
    return stream, blocks, events


def _read(
    path: Path, start: int, end: int | None, progress: Progress | None
) -> tuple[ByteStream, EventBlocks, EventColumns]:
    stream = ByteStream(path, start, end)
    blocks = EventBlocks(iter(stream), inside=start > 0)
    events = EventColumns()
    for block in blocks:
        events.add_block(block)
        if progress is not None:
            progress(stream.fraction)
    return stream, blocks, events


def _middle(path: Path, split_bytes: int) -> int | None:
    """The offset of a comma between two events near the middle; None where one process should read the file."""
    size = path.stat().st_size
    if size < split_bytes or not sys.executable or _num_cpus() < 2:
        return None
    with path.open("rb") as file:
        head = file.read(4)
        if head.startswith(GZIP_MAGIC) or text_encoding(head):
            return None
        file.seek(size // 2)
        cut = last_boundary(file.read(min(_SEARCH_BYTES, size // 4)))
    return size // 2 + cut if cut >= 0 else None


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _environment() -> dict[str, str]:
    """The own environment, with this package importable."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def main(arguments: list[str]) -> int:
    """Read PATH from byte START on and write the tail and the part."""
    _, blocks, events = _read(Path(arguments[0]), int(arguments[1]), None, None)
    pickle.dump((blocks.tail, events.part()), sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
