"""The logs that an emulated device writes to, so that a guard or a session can join without knowing the device.

`is_emulated()` also tells code that would talk to a real CUDA device (events, the profiler) to leave it alone.
"""

from __future__ import annotations

from perfdoctor.record.call_site import HitLog

LOGS: list[HitLog] = []  # all of them get each crossing; empty while nobody listens
num_ops = 0  # run on an emulated device in this process so far; the device counts up
_num_open = 0


def open_device() -> None:
    """An emulated device is in place from now on."""
    global _num_open
    _num_open += 1


def close_device() -> None:
    """Undo one `open_device`."""
    global _num_open
    _num_open -= 1


def is_emulated() -> bool:
    """Whether the CUDA device of this process is an emulated one."""
    return _num_open > 0


def join(log: HitLog) -> None:
    """Let `log` receive the crossings from now on."""
    LOGS.append(log)


def leave(log: HitLog) -> None:
    """Undo the last `join` of `log`."""
    for index in range(len(LOGS) - 1, -1, -1):
        if LOGS[index] is log:
            del LOGS[index]
            return
