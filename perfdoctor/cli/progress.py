"""Progress on standard error for whatever takes longer than a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 1.0


@contextmanager
def progress(what: str, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Say `what` on standard error once the block has run for `patience_s`, and how long it took at its end."""
    said = threading.Event()

    def speak() -> None:
        said.set()
        print(f"perfdoctor: {what} ...", file=sys.stderr, flush=True)

    timer = threading.Timer(patience_s, speak)
    timer.daemon = True
    start = time.perf_counter()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if said.is_set():
            print(f"perfdoctor: {what}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
