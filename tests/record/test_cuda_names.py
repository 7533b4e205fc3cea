"""Names of CUDA and HIP calls and copies, as the recorders write them."""

from __future__ import annotations

import pytest

from perfdoctor.record.capture import CallKind, CopyKind, HostMemory
from perfdoctor.record.cuda_names import call_kind, copy_kind, host_memory, strip_suffix


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaLaunchKernel", "LAUNCH"),
        ("cudaLaunchKernel_v7000", "LAUNCH"),
        ("cudaLaunchKernel_ptsz", "LAUNCH"),
        ("cudaLaunchKernelExC", "LAUNCH"),
        ("cuLaunchKernelEx", "LAUNCH"),
        ("cuLaunchKernel", "LAUNCH"),
        ("cudaLaunchCooperativeKernel_v9000_ptsz", "LAUNCH"),
        ("hipExtModuleLaunchKernel", "LAUNCH"),
        ("hipModuleLaunchKernel", "LAUNCH"),
        ("hipExtLaunchKernel", "LAUNCH"),
        ("cudaLaunchHostFunc", "OTHER"),
        ("cudaGraphLaunch_v10000", "GRAPH_LAUNCH"),
        ("hipGraphLaunch", "GRAPH_LAUNCH"),
        ("cuGraphLaunch", "GRAPH_LAUNCH"),
        ("cudaGraphInstantiate", "OTHER"),
        ("cudaMemcpyAsync", "MEMCPY"),
        ("cuMemcpyHtoDAsync_v2", "MEMCPY"),
        ("hipMemcpyWithStream", "MEMCPY"),
        ("cudaMemcpy2DAsync_v3020", "MEMCPY"),
        ("cudaMemsetAsync", "MEMSET"),
        ("cuMemsetD8Async", "MEMSET"),
        ("cudaDeviceSynchronize", "SYNC_DEVICE"),
        ("cuCtxSynchronize", "SYNC_DEVICE"),
        ("hipDeviceSynchronize", "SYNC_DEVICE"),
        ("cudaStreamSynchronize_v3020", "SYNC_STREAM"),
        ("cudaEventSynchronize", "SYNC_EVENT"),
        ("cudaEventQuery", "OTHER"),
        ("cudaEventRecordWithFlags", "EVENT_RECORD"),
        ("cudaEventRecord_v3020", "EVENT_RECORD"),
        ("cudaStreamWaitEvent", "STREAM_WAIT"),
        ("cudaMalloc", "MALLOC"),
        ("cudaMallocAsync", "MALLOC"),
        ("cudaHostAlloc", "MALLOC"),
        ("cuMemAlloc_v2", "MALLOC"),
        ("cuMemHostAlloc", "MALLOC"),
        ("cuMemCreate", "MALLOC"),
        ("hipHostMalloc", "MALLOC"),
        ("cudaFree", "FREE"),
        ("cudaFreeHost", "FREE"),
        ("cuMemFree_v2", "FREE"),
        ("cuMemUnmap", "FREE"),
        ("hipHostFree", "FREE"),
        ("cudaStreamGetCaptureInfo_v2", "OTHER"),
        ("cudaGetDeviceProperties", "OTHER"),
        ("INVALID", "OTHER"),
        ("", "OTHER"),
    ],
)
def test_call_kind(name: str, kind: str) -> None:
    assert call_kind(name) is CallKind[kind]


def test_only_the_recorders_suffix_goes() -> None:
    assert strip_suffix("cudaLaunchKernel_v7000_ptsz") == "cudaLaunchKernel"
    assert strip_suffix("cudaStreamGetCaptureInfo_v2_v11030") == "cudaStreamGetCaptureInfo_v2"
    assert strip_suffix("cuMemAlloc_v2") == "cuMemAlloc_v2"


@pytest.mark.parametrize(
    ("name", "copy", "memory"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "H2D", "PAGEABLE"),
        ("Memcpy HtoD (Pinned -> Device)", "H2D", "PINNED"),
        ("Memcpy DtoH (Device -> Pinned)", "D2H", "PINNED"),
        ("Memcpy DtoH (Device -> Pageable)", "D2H", "PAGEABLE"),
        ("Memcpy DtoD (Device -> Device)", "D2D", "UNKNOWN"),
        ("Memcpy PtoP (Device -> Device)", "P2P", "UNKNOWN"),
        ("Memcpy HtoH (Pageable -> Pinned)", "H2H", "PAGEABLE"),
        ("Memcpy HtoA (Pinned -> Array)", "H2D", "PINNED"),
        ("Memcpy HtoD (Host -> Device)", "H2D", "UNKNOWN"),
        ("CopyDeviceToHost", "D2H", "UNKNOWN"),
        ("CopyHostToDevice", "H2D", "UNKNOWN"),
        ("DtoD", "D2D", "UNKNOWN"),
        ("Memcpy Unknown (Pinned -> Device)", "H2D", "PINNED"),
        ("Memcpy", "NONE", "UNKNOWN"),
    ],
)
def test_copies(name: str, copy: str, memory: str) -> None:
    assert copy_kind(name) is CopyKind[copy]
    assert host_memory(name) is HostMemory[memory]
