"""What another thread is doing: its innermost frame."""

from __future__ import annotations

import gc
import sys
from types import FrameType


def frame_of(thread: int) -> FrameType | None:
    """Of the thread of this `ident`; None where it has ended.

    Python 3.11 makes frame objects while it holds a lock that a garbage collection among them may need again, and then
    stands still for ever (python/cpython issue 106883, mended in 3.12): none is let in there.
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return sys._current_frames().get(thread)
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        gc.enable()
