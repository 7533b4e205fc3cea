"""One reader on one file in a process of its own: prints seconds and peak memory as JSON.

Run as `python -m perfdoctor.bench.parse_worker READER FILE`.
"""

from __future__ import annotations

import gc
import gzip
import json
import logging
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Reader = Callable[[str], Any]


def _perfdoctor() -> Reader:
    from perfdoctor.record.load import load_capture

    return load_capture


def _orjson() -> Reader:
    import orjson

    def read(path: str) -> Any:
        opener = gzip.open if path.endswith(".gz") else open
        with opener(path, "rb") as file:
            text = file.read()
        gc.disable()
        return orjson.loads(text)

    return read


def _hta(backend: str, skipped: set[str] | None = None) -> Reader:
    from hta.common.trace_parser import parse_trace_dataframe  # type: ignore[import-untyped]
    from hta.configs.parser_config import ParserBackend, ParserConfig  # type: ignore[import-untyped]

    logging.disable(logging.CRITICAL)

    def read(path: str) -> Any:
        config = ParserConfig(skip_event_types=skipped)
        config.parser_backend = ParserBackend(backend)
        return parse_trace_dataframe(path, config)

    return read


READERS: dict[str, Callable[[], Reader]] = {
    "perfdoctor": _perfdoctor,
    "orjson, GC off": _orjson,
    "HTA json": lambda: _hta("json"),
    "HTA ijson": lambda: _hta("ijson_batch_and_compress", set()),
    # Its default leaves python_function rows out, which may be four rows in five: not the same work.
    "HTA ijson, part": lambda: _hta("ijson_batch_and_compress"),
}


def _memory_bytes(field: str) -> int:
    """A field of /proc/self/status: VmRSS is the resident size now, VmHWM its highest since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(arguments: list[str]) -> int:
    """Read FILE with READER once, after its imports."""
    name, path = arguments
    reader = READERS[name]()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = _memory_bytes("VmRSS")
    started = time.perf_counter()
    result = reader(path)
    seconds = time.perf_counter() - started
    # perfdoctor reads large files with a second process: its memory counts too.
    peak = _memory_bytes("VmHWM") - before + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    json.dump({"seconds": seconds, "peak_bytes": peak, "kind": type(result).__name__}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
