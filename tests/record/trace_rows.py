"""Rows of small traces whose figures can be worked out by hand. Times in microseconds."""

from __future__ import annotations

import json
from typing import Any

Row = dict[str, Any]


def row(cat: str, name: str, ts: float, dur: float, tid: Any = 11, pid: Any = 10, **args: Any) -> Row:
    """One complete event ("ph": "X")."""
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launch(ts: float, correlation: int, name: str = "cudaLaunchKernel", dur: float = 5.0) -> Row:
    """A CUDA call."""
    return row("cuda_runtime", name, ts, dur, correlation=correlation)


def kernel(ts: float, dur: float, correlation: int, stream: int = 7, name: str = "gemm") -> Row:
    """A kernel on device 0."""
    return row("kernel", name, ts, dur, stream, 0, device=0, stream=stream, correlation=correlation, grid=[4, 2, 1])


def two_steps() -> list[Row]:
    """Two steps of 100 us. Each: a kernel of 30 us, a copy of 2 us right behind a gap of 10 us, a sync of 40 us.

    Device busy 64 us; the span runs from 10 to 152: 142 us; gaps 10, 58 and 10 us.
    """
    rows = []
    for step, at in ((5, 0.0), (6, 100.0)):
        first = step * 10
        rows += [
            row("user_annotation", f"ProfilerStep#{step}", at, 100.0, **{"External id": first}),
            row("python_function", "train.py(3): step", at + 1, 90.0, **{"Python id": first}),
            row("cpu_op", "aten::mm", at + 2, 8.0, **{"External id": first + 1}),
            launch(at + 3, first),
            kernel(at + 10, 30.0, first),
            launch(at + 9, first + 1, "cudaMemcpyAsync"),
            row(
                "gpu_memcpy",
                "Memcpy DtoH (Device -> Pinned)",
                at + 50,
                2.0,
                7,
                0,
                device=0,
                stream=7,
                correlation=first + 1,
                bytes=4,
            ),
            launch(at + 15, first + 2, "cudaStreamSynchronize", 40.0),
        ]
    return rows


def document(rows: list[Any], **header: Any) -> dict[str, Any]:
    """A whole trace in Kineto's order: some keys before the events, some behind."""
    return {"schemaVersion": 1, **header, "traceEvents": rows, "traceName": "small.json"}


def kineto_text(rows: list[Any]) -> str:
    """The layout that Kineto itself writes: two spaces, events over several lines, keys in its order."""
    return json.dumps(document(rows), indent=2)
