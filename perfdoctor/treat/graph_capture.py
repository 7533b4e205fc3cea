"""One CUDA graph: warmed up, captured on a side stream, replayed; and a process left usable where that fails."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from perfdoctor.record import crossings
from perfdoctor.treat.graph_batch import with_items
from perfdoctor.watch.device_events import leave_to_parent
from perfdoctor.watch.sync_guard import allow_sync


def on_a_device() -> bool:
    """Whether graphs can be captured: the emulated device has none, and there each replay runs the step."""
    return not crossings.is_emulated()


@dataclass(slots=True)
class GraphMemory:
    """What all graphs of one step share: the stream they are captured on, and their memory pool.

    One stream for warm-up and graph capture: cuBLAS keeps a workspace for each stream, and the one made while warming
    up is the one that the graph then uses.
    """

    device: torch.device
    stream: Any
    pool: Any
    generators: tuple[torch.Generator, ...] = ()

    @classmethod
    def on(cls, device: torch.device, generators: tuple[torch.Generator, ...] = ()) -> GraphMemory:
        pool = torch.cuda.graph_pool_handle() if on_a_device() else None
        return cls(device, _side_stream(device), pool, generators)

    def renew(self) -> None:
        """Another pool for the graphs to come: one that no graph uses any more cannot be used again."""
        if self.pool is not None:
            self.pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """On the side stream, after what is queued on the current one, which waits for it afterwards."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)


@dataclass(slots=True)
class CapturedRun:
    """A function's device work as one graph, and what the function returned: tensors that each replay fills anew."""

    run: Callable[[], Any]
    memory: GraphMemory
    outputs: Any = None
    _graph: Any = field(default=None, repr=False)

    @property
    def emulated(self) -> bool:
        """Whether there is no graph, and each replay runs the function."""
        return self._graph is None

    def capture(self) -> None:
        """Capture `run` once. Nothing is computed.

        Raises:
            Exception: what came out of `run` or of CUDA; streams, allocator and random generators are usable again.
        """
        if not on_a_device():
            return  # no device to replay a graph on: each replay runs the function
        with _collector_paused(), self.memory.beside():
            with allow_sync("graph capture"):
                torch.cuda.synchronize(self.memory.device)
                torch.cuda.empty_cache()
            leave_to_parent()
            self._graph = torch.cuda.CUDAGraph()
            for generator in self.memory.generators:
                self._graph.register_generator_state(generator)
            self._record()

    def _record(self) -> None:
        # "thread_local": a DataLoader's pinning thread may allocate while we capture ("global" would fail then).
        try:
            self._graph.capture_begin(pool=self.memory.pool, capture_error_mode="thread_local")
            self.outputs = self.run()
            self._graph.capture_end()
        except BaseException:
            self.outputs = None
            graph, self._graph = self._graph, None
            with allow_sync("recovery from a failed graph capture"):
                _recover(graph, self.memory)
            raise

    def replay(self) -> Any:
        """Launch the graph on the current stream; returns `outputs`."""
        if self._graph is None:
            self.outputs = self.run()
        else:
            self._graph.replay()
        return self.outputs

    def release(self) -> None:
        """Give the graph's memory back to its pool."""
        self.outputs = None
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


_streams: dict[int, Any] = {}


def _side_stream(device: torch.device) -> Any:
    # One a device for good: cuBLAS holds 32 MiB on Hopper for every stream and thread that ever ran a matmul.
    if not on_a_device():
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    index = device.index or 0
    if index not in _streams:
        _streams[index] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[index]


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    # A collection during graph capture may free CUDA events or other graphs, which is not allowed then.
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _recover(graph: Any, memory: GraphMemory) -> None:
    """After a failed graph capture: take out of its hands what `capture_end` left there.

    Where CUDA has invalidated the capture, `capture_end` raises at once, and the allocator goes on filling the graph's
    pool and the default generator goes on counting for the graph.
    """
    index = memory.device.index or 0
    names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")  # the second: torch before 2.8
    end = next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))
    with contextlib.suppress(Exception):
        graph.capture_end()
    with contextlib.suppress(Exception):
        end(index, memory.pool)
        torch._C._cuda_releasePool(index, memory.pool)
    with contextlib.suppress(Exception):
        graph.reset()
    del graph
    memory.renew()
    for _ in range(2):  # the first may still report the capture's error
        with contextlib.suppress(Exception):
            torch.cuda.synchronize(memory.device)
    _reset_generators(memory)


def _reset_generators(memory: GraphMemory) -> None:
    # A capture that succeeds ends every generator's counting for the one that failed.
    for _ in range(2):
        with contextlib.suppress(Exception):
            probe = torch.cuda.CUDAGraph()
            for generator in memory.generators:
                probe.register_generator_state(generator)
            cell = torch.zeros(1, device=memory.device)
            stream = _side_stream(memory.device)
            stream.wait_stream(torch.cuda.current_stream(memory.device))
            with torch.cuda.stream(stream):
                probe.capture_begin(capture_error_mode="thread_local")
                try:
                    cell.add_(1)
                finally:
                    probe.capture_end()
            return


def warm_up(run: Callable[[], Any], memory: GraphMemory, times: int) -> list[Any]:
    """Run it on the side stream, so that lazy work (libraries, autotuning, state) is over. Returns what it returned."""
    found = []
    with memory.beside():
        for _ in range(times):
            found.append(run())
    return found


def detached(value: Any, copy: bool) -> Any:
    """Outputs without their autograd graph (which would keep the step's streams alive), as copies where asked."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if copy else value.detach()
    if isinstance(value, dict):
        return with_items(value, {key: detached(item, copy) for key, item in value.items()})
    if isinstance(value, tuple | list):
        items = [detached(item, copy) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def output_leaves(value: Any, path: str = "the step's result") -> list[tuple[str, Any]]:
    """Everything in the outputs that is no container, with its path."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in output_leaves(item, f"{path}[{key!r}]")]
    if isinstance(value, tuple | list):
        return [leaf for i, item in enumerate(value) for leaf in output_leaves(item, f"{path}[{i}]")]
    return [(path, value)]


def gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """What `.grad` holds of each."""
    return [p.grad for p in parameters]
