"""The plain figures of a recording, without any judgement: what can be counted and added up by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from perfdoctor.record import intervals
from perfdoctor.record.capture import CallKind, Capture, Work, WorkKind
from perfdoctor.record.devices import busiest_device

SYNC_CALLS = (CallKind.SYNC_DEVICE, CallKind.SYNC_STREAM, CallKind.SYNC_EVENT)
_NS_PER_US = 1000


def summarise(capture: Capture) -> dict[str, Any]:
    """Counts and microseconds of the whole recording.

    Busy, span, idle and the largest gap are those of the device that worked most: busy is the union of its kernels,
    copies and memsets over all streams, the span runs from the first start to the last end. `kernels` is None where
    CUDA graphs were traced whole. Sync calls are those of stream, event and device, the profiler's own last one
    included where it made one.
    """
    work, calls = capture.work, capture.calls
    devices = {int(device): _device_summary(work.take(work.device == device)) for device in np.unique(work.device)}
    busiest = busiest_device(work.device, work.start_ns, work.end_ns)
    main = _device_summary(Work.empty()) if busiest is None else devices[busiest]
    sync = np.isin(calls.kind, SYNC_CALLS)
    num_kernels = int((work.kind == WorkKind.KERNEL).sum())
    graph_rows = int((work.kind == WorkKind.GRAPH).sum())
    return {
        "kernels": None if graph_rows and not num_kernels else num_kernels,
        "memcpys": int((work.kind == WorkKind.MEMCPY).sum()),
        "memsets": int((work.kind == WorkKind.MEMSET).sum()),
        **main,
        "devices": devices,
        "syncs": int(sync.sum()),
        "sync_wait_us": int((calls.end_ns - calls.start_ns)[sync].sum()) / _NS_PER_US,
        "steps": len(capture.steps),
        "launches": int((calls.kind == CallKind.LAUNCH).sum()),
        "graph_launches": int((calls.kind == CallKind.GRAPH_LAUNCH).sum()),
        "kernels_per_launch": _kernels_per_launch(capture),
        "rank": capture.environment.rank,
    }


def _device_summary(work: Work) -> dict[str, float]:
    busy = intervals.union(work.start_ns, work.end_ns)
    if not len(busy[0]):
        return {"gpu_busy_us": 0.0, "gpu_span_us": 0.0, "gpu_idle_us": 0.0, "largest_gap_us": 0.0}
    span = int(busy[1][-1] - busy[0][0])
    total = intervals.total(busy)
    gap = int((busy[0][1:] - busy[1][:-1]).max(initial=0))
    names = ("gpu_busy_us", "gpu_span_us", "gpu_idle_us", "largest_gap_us")
    return {name: ns / _NS_PER_US for name, ns in zip(names, (total, span, span - total, gap), strict=True)}


def _kernels_per_launch(capture: Capture) -> float | None:
    """Kernels for each CUDA graph launch, None without such launches."""
    launches = capture.calls.correlation[capture.calls.kind == CallKind.GRAPH_LAUNCH]
    if not len(launches):
        return None
    kernels = capture.work.correlation[capture.work.kind == WorkKind.KERNEL]
    return int(np.isin(kernels, launches).sum()) / len(launches)
