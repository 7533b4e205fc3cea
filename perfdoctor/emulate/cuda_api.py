"""Stand-ins for `torch.cuda`, `torch.accelerator` and what torch asks of a build with CUDA."""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from perfdoctor.emulate import border, streams
from perfdoctor.emulate.arrivals import arrive
from perfdoctor.emulate.patches import Patches
from perfdoctor.emulate.tensor import CudaTensor
from perfdoctor.errors import UsageError

NAME = "perfdoctor emulated CUDA device"
MEMORY_BYTES = 80 * 2**30
CAPABILITY = (9, 0)
_DEVICE = torch.device("cuda", 0)


def install(patches: Patches) -> None:
    """Replace the parts of torch that a CUDA build would answer."""
    for module, names in _TABLES:
        for name, value in names.items():
            if hasattr(module, name):
                patches.set(module, name, value)
    patches.on_undo(lambda: _set_sync_debug_mode(0))


class _LegacyType(type):
    """`torch.cuda.FloatTensor` and its kin: makes tensors from sizes or data, and answers isinstance."""

    dtype: torch.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and all(isinstance(arg, int) for arg in args):
            return torch.empty(args, dtype=cls.dtype, device=_DEVICE)
        return torch.tensor(args[0] if args else [], dtype=cls.dtype, device=_DEVICE)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, CudaTensor) and instance.dtype is cls.dtype


def _legacy_type(name: str, dtype: torch.dtype) -> Any:
    return _LegacyType(name, (), {"dtype": dtype, "__module__": "torch.cuda"})


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


# torch.compile files functions by identity, each name by its own rule: two names that it knows need two stand-ins.
_nothing = _constant(None)


def _synchronize(device: Any = None) -> None:
    border.cross("cuda_synchronize")
    arrive()


def _empty_cache() -> None:
    border.cross("empty_cache")


def _refuse(what: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            f"{what}: CUDA graphs cannot be captured on the emulated CUDA device (there is no device to replay them). "
            "Guard the call, or run this part on a GPU."
        )

    return refused


class _RefusedGraph:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("torch.cuda.CUDAGraph")()


class _RefusedGraphContext:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("torch.cuda.graph")()


class _DeviceContext(contextlib.ContextDecorator):
    """`torch.cuda.device(0)` and `torch.cuda.device_of(tensor)`: there is one device, so nothing to switch."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0
        self.prev_idx = 0

    def __enter__(self) -> _DeviceContext:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was switched."""


def _properties(device: Any = None) -> Any:
    return types.SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=MEMORY_BYTES, multi_processor_count=132,
        is_multi_gpu_board=0, is_integrated=0, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        regs_per_multiprocessor=65536, warp_size=32, shared_memory_per_block=49152, L2_cache_size=50 * 2**20,
        shared_memory_per_multiprocessor=233472, shared_memory_per_block_optin=232448, gcnArchName="",
    )  # fmt: skip


def _rng_state(device: Any = None) -> torch.Tensor:
    # Device random numbers are drawn from the host's generator here.
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def _set_rng_state_all(states: Any) -> None:
    for state in states:
        _set_rng_state(state)


def _set_sync_debug_mode(mode: Any) -> None:
    border.sync_debug_mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)


class _GeneratorType(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_GeneratorType):
    """`torch.Generator`, also for device="cuda": a host generator that names the device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        named = torch.device(device)
        self: Any = super().__new__(cls, device="cpu" if named.type == "cuda" else named)  # type: ignore[call-arg]
        self._device = _DEVICE if named.type == "cuda" else named
        return self

    device = property(lambda self: self._device)  # type: ignore[assignment]


class _CudaRuntime:
    """`torch.cuda.cudart()`: the profiler switches scripts call; no driver is behind it."""

    cudaError = types.SimpleNamespace(success=0)

    def __getattr__(self, name: str) -> Any:
        return _constant(0)

    def cudaMemGetInfo(self, device: int = 0) -> tuple[int, int]:
        return MEMORY_BYTES, MEMORY_BYTES


@contextlib.contextmanager
def _nvtx_range(message: str, *args: Any, **kwargs: Any) -> Any:
    yield


_LEGACY = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16, "LongTensor": torch.int64,
    "IntTensor": torch.int32, "ShortTensor": torch.int16, "CharTensor": torch.int8, "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool, "BFloat16Tensor": torch.bfloat16,
}  # fmt: skip
_ZEROS = (
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached "
    "utilization memory_usage temperature power_draw clock_rate current_blas_handle"
)
_QUIET = (
    "init _lazy_init set_device ipc_collect reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached "
    "reset_accumulated_memory_stats set_per_process_memory_fraction manual_seed manual_seed_all seed seed_all"
)
_MEMORY = {
    **{name: _constant(0) for name in _ZEROS.split()},
    "memory_stats": lambda device=None: OrderedDict(),
    "memory_summary": _constant("no memory is counted on the emulated CUDA device"),
    "mem_get_info": _constant((MEMORY_BYTES, MEMORY_BYTES)),
    "empty_cache": _empty_cache,
    "reset_peak_memory_stats": _nothing,
    "reset_accumulated_memory_stats": _nothing,
    "memory_snapshot": _constant([]),
    "_snapshot": _constant({"segments": [], "device_traces": []}),
    "_record_memory_history": _constant(None),
    "_dump_snapshot": _constant(None),
}
_CUDA: dict[str, Any] = {
    **{name: _constant(None) for name in _QUIET.split()},
    **_MEMORY,
    "is_available": _constant(True),
    "is_initialized": _constant(True),
    "_is_in_bad_fork": _constant(False),
    "device_count": _constant(1),
    "current_device": _constant(0),
    "get_device_name": _constant(NAME),
    "get_device_capability": _constant(CAPABILITY),
    "get_device_properties": _properties,
    "is_bf16_supported": _constant(True),
    "is_tf32_supported": _constant(True),
    "get_arch_list": _constant(["sm_90"]),
    "can_device_access_peer": _constant(False),
    "synchronize": _synchronize,
    "current_stream": streams.current_stream,
    "default_stream": lambda device=None: streams.DEFAULT,
    "set_stream": streams.set_stream,
    "stream": streams.StreamContext,
    "StreamContext": streams.StreamContext,
    "Stream": streams.Stream,
    "Event": streams.Event,
    "device": _DeviceContext,
    "device_of": _DeviceContext,
    "set_sync_debug_mode": _set_sync_debug_mode,
    "get_sync_debug_mode": lambda: border.sync_debug_mode,
    "get_rng_state": _rng_state,
    "get_rng_state_all": lambda: [_rng_state()],
    "set_rng_state": _set_rng_state,
    "set_rng_state_all": _set_rng_state_all,
    "initial_seed": torch.initial_seed,
    "is_current_stream_capturing": _constant(False),
    "CUDAGraph": _RefusedGraph,
    "graph": _RefusedGraphContext,
    "make_graphed_callables": _refuse("torch.cuda.make_graphed_callables"),
    "graph_pool_handle": _refuse("torch.cuda.graph_pool_handle"),
    **{name: _legacy_type(name, dtype) for name, dtype in _LEGACY.items()},
    "cudart": _CudaRuntime,
    "_sleep": _nothing,
    "get_amp_supported_dtype": _constant([torch.float16, torch.bfloat16, torch.float32]),
}
_ACCELERATOR: dict[str, Any] = {
    **_MEMORY,
    "is_available": _constant(True),
    "device_count": _constant(1),
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_index": _constant(0),
    "current_device_idx": _constant(0),
    "set_device_index": _nothing,
    "device_index": _DeviceContext,
    "set_device_idx": _nothing,
    "current_stream": streams.current_stream,
    "set_stream": streams.set_stream,
    "synchronize": _synchronize,
    "get_memory_info": _constant((MEMORY_BYTES, MEMORY_BYTES)),
}
_NVTX = {
    "range_push": _constant(0), "range_pop": _constant(0), "range_start": _constant(0), "range_end": _nothing,
    "mark": _nothing, "range": _nvtx_range,
}  # fmt: skip
_SEEDS = (
    "get_rng_state get_rng_state_all set_rng_state set_rng_state_all "
    "manual_seed manual_seed_all seed seed_all initial_seed"
)
_GRAPHS = "CUDAGraph graph make_graphed_callables is_current_stream_capturing"
_TABLES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.cuda, _CUDA),
    (torch.cuda.memory, _MEMORY),
    (torch.cuda.random, {name: _CUDA[name] for name in _SEEDS.split()}),
    (torch.cuda.streams, {"Stream": streams.Stream, "Event": streams.Event}),
    (torch.cuda.graphs, {name: _CUDA[name] for name in _GRAPHS.split()}),
    (torch.cuda.nvtx, _NVTX),
    (torch.accelerator, _ACCELERATOR),
    (torch, {"Generator": Generator, "Event": streams.Event, "Stream": streams.Stream}),
    (torch.cuda.nccl, {"version": _constant((2, 27, 7))}),
    (torch.backends.cudnn, {"is_acceptable": _constant(False)}),
    (torch.backends.cuda, {"is_built": _constant(True)}),
)  # fmt: skip
