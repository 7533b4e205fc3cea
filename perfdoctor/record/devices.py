"""Which of several devices a page is about."""

from __future__ import annotations

import numpy as np

from perfdoctor.record import intervals
from perfdoctor.record.capture import Ints


def busiest_device(device: Ints, start_ns: Ints, end_ns: Ints) -> int | None:
    """The device that was busy longest, the first of equals; None without work. Rows say nothing: they may be tiny."""
    devices = np.unique(device).tolist()
    if len(devices) < 2:
        return devices[0] if devices else None
    busy = [intervals.total(intervals.union(start_ns[device == d], end_ns[device == d])) for d in devices]
    return int(devices[int(np.argmax(busy))])
