"""A trace file of any size in the layout of torch.profiler, with known figures: input for benchmarks and tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

_STEP_US = 5000.0
_LAYERS = 40
_LAYER_US = 100.0
_KERNEL_US = 62.125
_HEADER = {
    "schemaVersion": 1,
    "deviceProperties": [
        {"id": 0, "name": "Synthetic GPU", "totalGlobalMem": 80_000_000_000, "computeMajor": 9, "computeMinor": 0}
    ],
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
    "cuda_driver_version": 13000,
    "baseTimeNanoseconds": 1_700_000_000_000_000_000,
}
_MODULE = "site-packages/torch/nn/modules/linear.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticFigures:
    """What is true of a written trace."""

    num_steps: int
    num_events: int
    num_kernels: int
    busy_ns: int
    num_syncs: int


def write_trace(path: Path, num_bytes: int) -> SyntheticFigures:
    """Write steps until the file has at least `num_bytes`. The same size gives the same file."""
    steps = events = 0
    with path.open("w", encoding="utf-8") as file:
        _write_header(file)
        separator = ""
        while not steps or file.tell() < num_bytes:
            for row in _step_rows(steps):
                file.write(separator + row)
                separator = ",\n  "
                events += 1
            steps += 1
        file.write('\n  ],\n  "traceName": "synthetic.json",\n  "displayTimeUnit": "ms"\n}\n')
    kernels = steps * _LAYERS
    busy = kernels * round(_KERNEL_US * 1000) + steps * 2000
    return SyntheticFigures(num_steps=steps, num_events=events, num_kernels=kernels, busy_ns=busy, num_syncs=steps)


def _write_header(file: TextIO) -> None:
    keys = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in _HEADER.items())
    file.write("{\n" + keys + ',\n  "traceEvents": [\n  ')


def _step_rows(step: int) -> Iterator[str]:
    start = 1_000_000.0 + step * _STEP_US
    first_id = step * (_LAYERS + 2) + 1
    yield _row("user_annotation", f"ProfilerStep#{step}", 11, start, _STEP_US, f'"External id": {first_id}')
    for layer in range(_LAYERS):
        yield from _layer_rows(layer, start + layer * _LAYER_US, first_id + layer)
    copy, last = first_id + _LAYERS, start + _LAYERS * _LAYER_US
    yield _row("cuda_runtime", "cudaMemcpyAsync", 11, last, 10.5, f'"cbid": 41, "correlation": {copy}')
    arguments = f'"device": 0, "stream": 7, "correlation": {copy}, "bytes": 4'
    yield _row("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 7, last + 200.0, 2.0, arguments, pid=0)
    yield _row("cuda_runtime", "cudaStreamSynchronize", 11, last + 11.0, 195.25, f'"correlation": {copy + 1}')


def _layer_rows(layer: int, at: float, identifier: int) -> Iterator[str]:
    names = f'"Ev Idx": {identifier}, "Python id": {identifier}'
    yield _row("python_function", f"nn.Module: Linear_{layer}", 11, at, 60.5, names)
    for depth in range(3):
        yield _row("python_function", f"{_MODULE}({depth + 90}): forward", 11, at + depth, 58.0 - depth, names)
    shapes = '"Input Dims": [[32, 1024], [1024, 1024], [1024]], "Input type": ["float", "float", "float"]'
    yield _row("cpu_op", "aten::linear", 11, at + 5.0, 40.0, f'"External id": {identifier}, {shapes}')
    yield _row("cpu_op", "aten::addmm", 11, at + 7.125, 36.0, f'"External id": {identifier}, {shapes}')
    yield _row("cuda_runtime", "cudaLaunchKernel", 11, at + 20.25, 9.875, f'"cbid": 211, "correlation": {identifier}')
    flow = f'"id": {identifier}, "ts": {at + 20.25:.3f}, "cat": "ac2g", "name": "ac2g"'
    yield f'{{\n    "ph": "s", "pid": 10, "tid": 11, {flow}\n  }}'
    launch = f'"device": 0, "stream": 7, "correlation": {identifier}, "grid": [8, 16, 1], "block": [128, 1, 1]'
    kernel = f"void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_{layer % 8}>(Params)"
    yield _row("kernel", kernel, 7, at + 35.0, _KERNEL_US, f'"queued": 0, {launch}', pid=0)


def _row(cat: str, name: str, tid: int, ts: float, dur: float, arguments: str, pid: int = 10) -> str:
    head = f'{{\n    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
    return f'{head}    "ts": {ts:.3f}, "dur": {dur:.3f},\n    "args": {{\n      {arguments}\n    }}\n  }}'
