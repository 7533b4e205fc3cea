"""Whether the script that nsys was to start has begun: until then nsys may be started anew, afterwards never.

nsys 2022.4 fails before it starts anything once in some 50 runs on a busy machine ("End of file", "Local Endpoint is
not available"), whatever it is asked to record.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_BEGUN = "PERFDOCTOR_BEGUN"  # the environment variable that names the file to leave


@contextmanager
def begin_noticed(environment: Mapping[str, str]) -> Iterator[tuple[dict[str, str], Callable[[], bool]]]:
    """(the environment for nsys, a function that tells whether `say_begun` was called inside)."""
    with tempfile.TemporaryDirectory(prefix="perfdoctor-nsys-") as folder:
        path = Path(folder, "begun")
        yield {**environment, _BEGUN: str(path)}, path.exists


def say_begun() -> None:
    """From inside nsys: the script begins now."""
    path = os.environ.pop(_BEGUN, "")
    if path:
        with suppress(OSError):  # nobody waits for it any more
            Path(path).touch()
