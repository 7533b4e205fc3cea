"""A training loop on a machine of the simplest kind, so that what a fix gives back is known exactly.

`Machine` runs a loop written as calls (`host`, `launch`, `read`, ...) on one host clock and in-order streams, and
notes what a tracer would have noted. A loop and its fixed twin run on the same machine: the difference of their
periods is the truth that a diagnosis is held against. It shares no code with the package but the types of a
`Capture`. Times in ns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from perfdoctor.record.capture import (
    CallKind,
    Calls,
    Capture,
    CopyKind,
    Costs,
    Environment,
    Frame,
    Hits,
    HostMemory,
    Pauses,
    Phase,
    RangeKind,
    Ranges,
    Site,
    Spans,
    Steps,
    StreamSyncs,
    Work,
    WorkKind,
)

US = 1_000
MS = 1_000_000
START = 10**12
UNTRACED = Costs(call_ns=0, op_ns=0, frame_ns=0, full_share=0.0, measured=True)
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas"
POINTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)


def site(line: int, file: str = "train.py") -> Site:
    return Site(frame=Frame(file=file, line=line, function="main"))


@dataclass
class Machine:
    """One host, one device. `call_ns` inside every API call, `latency_ns` from a launch to a kernel on an idle stream,
    `gap_ns` between two kernels, `return_ns` from the end of what a sync waited for to its return."""

    call_ns: int = 4 * US
    latency_ns: int = 6 * US
    gap_ns: int = 1 * US
    return_ns: int = 5 * US
    now: int = START
    thread: int = 1
    device: int = 0
    free: dict[int, int] = field(default_factory=dict)  # stream -> end of its last work
    barrier: dict[int, int] = field(default_factory=dict)  # stream -> an event that its next work waits for
    events: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> (time, correlation)
    step_starts: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)  # max(host, device) at each step's end
    strings: list[str] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    correlation: int = 0
    rows: dict[str, list[tuple[Any, ...]]] = field(
        default_factory=lambda: {t: [] for t in ("calls", "work", "ops", "frames", "ranges", "syncs", "hits", "pauses")}
    )

    # ---- the loop's words ----

    def step(self) -> None:
        """The host begins a step."""
        if self.step_starts:
            self._close()
        self.step_starts.append(self.now)

    def _close(self) -> None:
        self.marks.append(max(self.now, max(self.free.values(), default=self.now)))

    def host(self, ns: int, pause: str = "", named: str = "") -> None:
        """The host works; noted as a pause (a garbage collection, the loader) or as a range where it has a name."""
        start, self.now = self.now, self.now + ns
        if pause:
            self.rows["pauses"].append((start, self.now, self.thread, self.text(pause), len(self.step_starts) - 1, -1))
        if named:
            self.rows["ranges"].append((start, self.now, self.thread, self.text(named), RangeKind.USER))

    def launch(self, ns: int, name: str = GEMM, stream: int = 7, kernels: int = 1, own_ns: int | None = None) -> int:
        """A kernel launch, or one graph launch of several kernels; returns the end of the last."""
        kind = CallKind.LAUNCH if kernels == 1 else CallKind.GRAPH_LAUNCH
        text = "cudaLaunchKernel" if kernels == 1 else "cudaGraphLaunch"
        end = 0
        for _ in range(kernels):
            end = self._run(ns, name, stream, WorkKind.KERNEL)
        self._call(text, kind, self.call_ns if own_ns is None else own_ns)
        return end

    def memset(self, ns: int = 2 * US, stream: int = 7) -> None:
        self._run(ns, "Memset (Device)", stream, WorkKind.MEMSET, size=4)
        self._call("cudaMemsetAsync", CallKind.MEMSET, self.call_ns)

    def to_device(self, ns: int, size: int, pageable: bool = False, stream: int = 7) -> None:
        """An H2D copy: from pinned memory it is queued, from pageable memory the call lasts until it is over."""
        memory = HostMemory.PAGEABLE if pageable else HostMemory.PINNED
        kind = "Pageable" if pageable else "Pinned"
        end = self._run(ns, f"Memcpy HtoD ({kind} -> Device)", stream, WorkKind.MEMCPY, size, CopyKind.H2D, memory)
        wait = max(end - self.now, 0) + self.return_ns if pageable else self.call_ns
        self._call("cudaMemcpyAsync", CallKind.MEMCPY, wait)

    def read(
        self, size: int = 4, ns: int = 2 * US, stream: int = 7, at: Site | None = None, kind: str = "item"
    ) -> None:
        """`.item()`: a D2H copy, then the host waits for its stream; `at` is what a hook saw.

        A large one, `.cpu()`, goes to pageable memory: the call itself lasts until it is over.
        """
        start = self.now
        memory = HostMemory.PINNED if size <= 8 else HostMemory.PAGEABLE
        name = "Memcpy DtoH (Device -> Pinned)"
        end = self._run(ns, name, stream, WorkKind.MEMCPY, size, CopyKind.D2H, memory)
        held = end - self.now + self.return_ns if memory == HostMemory.PAGEABLE else self.call_ns
        self._call("cudaMemcpyAsync", CallKind.MEMCPY, held)
        self.wait_stream(stream)
        if at is not None:
            self.hit(at, kind, start)

    def wait_stream(self, stream: int = 7, noted: bool = False) -> None:
        """cudaStreamSynchronize; `noted` adds the `cuda_sync` row that names the stream."""
        self._sync("cudaStreamSynchronize", CallKind.SYNC_STREAM, self.free.get(stream, 0), stream if noted else None)

    def wait_device(self) -> None:
        target = max(self.free.values(), default=0)
        self._sync("cudaDeviceSynchronize", CallKind.SYNC_DEVICE, target, None)

    def record(self, event: str, stream: int = 7, traced: bool = True) -> None:
        """cudaEventRecord; newer profilers leave the call out (`traced=False`)."""
        self.correlation += 1
        self.events[event] = (self.free.get(stream, 0), self.correlation if traced else -1)
        if traced:
            self._call("cudaEventRecord", CallKind.EVENT_RECORD, self.call_ns)

    def stream_waits(self, event: str, stream: int, noted: bool = False, known: bool = False) -> None:
        """cudaStreamWaitEvent: later work on `stream` waits. `noted`: a `cuda_sync` row; `known`: with its record."""
        self.barrier[stream] = max(self.barrier.get(stream, 0), self.events[event][0])
        if noted:
            record = self.events[event][1] if known else -1
            row = (self.now, self.now + 1, CallKind.STREAM_WAIT, stream, self.correlation + 1, record)
            self.rows["syncs"].append(row)
        self.correlation += 1
        self._call("cudaStreamWaitEvent", CallKind.STREAM_WAIT, self.call_ns)

    def wait_event(self, event: str) -> None:
        self._sync("cudaEventSynchronize", CallKind.SYNC_EVENT, self.events[event][0], None)

    def allocate(self, ns: int, kind: CallKind = CallKind.MALLOC) -> None:
        self.correlation += 1
        self._call("cudaMalloc" if kind == CallKind.MALLOC else "cudaFree", kind, ns)

    def hit(self, at: Site, kind: str, start: int, phase: Phase = Phase.LIGHT) -> None:
        """What a live hook notes: a line, a kind, from `start` to now."""
        if at not in self.sites:
            self.sites.append(at)
        row = (start, self.now, self.thread, self.sites.index(at), self.text(kind), len(self.step_starts) - 1, phase)
        self.rows["hits"].append(row)

    def op(self, name: str, start: int, table: str = "ops") -> None:
        """A span from `start` to now: an op, or a Python frame."""
        self.rows[table].append((start, self.now, self.thread, self.text(name)))

    # ---- the machine ----

    def text(self, name: str) -> int:
        if name not in self.strings:
            self.strings.append(name)
        return self.strings.index(name)

    def _run(
        self, ns: int, name: str, stream: int, kind: WorkKind, size: int = -1,
        copy: CopyKind = CopyKind.NONE, memory: HostMemory = HostMemory.UNKNOWN,
    ) -> int:  # fmt: skip
        start = max(self.now + self.latency_ns, self.free.get(stream, -self.gap_ns) + self.gap_ns)
        start = max(start, self.barrier.pop(stream, 0))
        self.free[stream] = start + ns
        what = (self.text(name), kind, self.correlation + 1, size, copy, memory, -1)
        row = (start, start + ns, self.device, stream, *what)
        self.rows["work"].append(row)
        return start + ns

    def _call(self, name: str, kind: CallKind, ns: int) -> None:
        if kind in (CallKind.LAUNCH, CallKind.GRAPH_LAUNCH, CallKind.MEMCPY, CallKind.MEMSET):
            self.correlation += 1
        row = (self.now, self.now + ns, self.thread, self.text(name), kind, self.correlation)
        self.rows["calls"].append(row)
        self.now += ns

    def _sync(self, name: str, kind: CallKind, target: int, stream: int | None) -> None:
        self.correlation += 1
        end = max(self.now, target) + self.return_ns
        if stream is not None:
            self.rows["syncs"].append((self.now, end, kind, stream, self.correlation, -1))
        self._call(name, kind, end - self.now)

    # ---- what came of it ----

    def capture(self, first: int = 0, marked: bool = True, **given: Any) -> Capture:
        """The recording from step `first` on. Call after the last step; `marked=False` leaves the step marks out."""
        if len(self.marks) < len(self.step_starts):
            self._close()
        begin = self.step_starts[first] if self.step_starts else START
        kept = {name: [row for row in rows if row[0] >= begin] for name, rows in self.rows.items()}
        # Work that was under way when the recording began is in it, its launch is not.
        kept["work"] = [row for row in self.rows["work"] if row[1] > begin]
        bounds = [*self.step_starts[first:], self.now]
        steps = [(a, b, i, 0, -1, 1, 0) for i, (a, b) in enumerate(pairwise(bounds))]
        kept["hits"] = [(*row[:5], row[5] - first, row[6]) for row in kept["hits"]]
        return Capture(
            **{
                "source": "test",
                "calls": Calls.from_rows(kept["calls"]),
                "work": Work.from_rows(kept["work"]),
                "ops": Spans.from_rows(kept["ops"]),
                "frames": Spans.from_rows(kept["frames"]),
                "ranges": Ranges.from_rows(kept["ranges"]),
                "stream_syncs": StreamSyncs.from_rows(kept["syncs"]),
                "hits": Hits.from_rows(kept["hits"]),
                "pauses": Pauses.from_rows(kept["pauses"]),
                "steps": Steps.from_rows(steps if marked and self.step_starts else []),
                "strings": tuple(self.strings),
                "sites": tuple(self.sites),
                "environment": Environment(),
                "costs": UNTRACED,
                **given,
            }
        )

    @property
    def period_ns(self) -> float:
        """Time of a step in steady state: over the second half of the steps."""
        if len(self.marks) < len(self.step_starts):
            self._close()
        half = len(self.marks) // 2
        return (self.marks[-1] - self.marks[half - 1]) / (len(self.marks) - half)


Body = Callable[[Machine, int], None]


def run_loop(body: Body, steps: int = 10, **machine: int) -> Machine:
    """The loop of `steps` steps; `body(machine, step)` is one of them."""
    running = Machine(**machine)
    for step in range(steps):
        running.step()
        body(running, step)
    return running


def period(body: Body, steps: int = 40, **machine: int) -> float:
    """The period of a loop in steady state."""
    return run_loop(body, steps, **machine).period_ns


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)
