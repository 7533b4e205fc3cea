"""CUDA events, made so that a forked worker survives them.

A worker that a DataLoader forks has a copy of every object of ours. Where an event, or another object of CUDA's, is
part of a cycle that nobody needs any more, the first garbage collection in the worker destroys it, and CUDA cannot be
used there: `terminate called ... CUDA error: initialization error`, and the loop fails with `DataLoader worker (pid
...) is killed by signal: Aborted` (seen on an H200, torch 2.11, with a compiled model that a trial had let go of). So
once there is an event of ours, what a child inherits is left alone by its garbage collector.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

_guarded = False


def new_event(*, timed: bool = False) -> Any:
    """A `torch.cuda.Event`. torch is loaded."""
    leave_to_parent()
    torch: Any = sys.modules["torch"]
    return torch.cuda.Event(enable_timing=timed)


def leave_to_parent() -> None:
    """From now on forked children keep what they inherit: it is frozen. What they make themselves is collected.

    For the life of the process: functions around a fork cannot be taken back, nor can it be known when what was made
    here is gone. A child pays microseconds, and shares more of its memory with the parent.
    """
    global _guarded
    if not _guarded and hasattr(os, "register_at_fork"):
        _guarded = True
        os.register_at_fork(after_in_child=gc.freeze)
