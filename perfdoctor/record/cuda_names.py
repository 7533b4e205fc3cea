"""What the names of CUDA and HIP say: the kind of an API call, the way a copy goes, the memory it reads."""

from __future__ import annotations

import re
from functools import lru_cache

from perfdoctor.record.capture import CallKind, CopyKind, HostMemory

# Nsight appends the CUDA version that brought the entry point (_v3020, _v7000, _v10000) and the default-stream flavour.
# `cudaStreamGetCaptureInfo_v2` is a real name: one or two digits stay.
_RECORDER_SUFFIX = re.compile(r"(?:_v\d{4,}|_ptsz|_ptds)+$")
_ANY_SUFFIX = re.compile(r"(?:_v\d+|_ptsz|_ptds|_spt)+$")
_PREFIX = re.compile(r"^(?:cuda|cu|hip)(?=[A-Z])")

_EXACT = {
    "GraphLaunch": CallKind.GRAPH_LAUNCH,
    "DeviceSynchronize": CallKind.SYNC_DEVICE,
    "ThreadSynchronize": CallKind.SYNC_DEVICE,
    "CtxSynchronize": CallKind.SYNC_DEVICE,
    "StreamSynchronize": CallKind.SYNC_STREAM,
    "EventSynchronize": CallKind.SYNC_EVENT,
    "EventRecord": CallKind.EVENT_RECORD,
    "EventRecordWithFlags": CallKind.EVENT_RECORD,
    "StreamWaitEvent": CallKind.STREAM_WAIT,
    "LaunchHostFunc": CallKind.OTHER,  # runs on the host: it launches no kernel
    "Launch": CallKind.LAUNCH,
    "LaunchGrid": CallKind.LAUNCH,
    "LaunchGridAsync": CallKind.LAUNCH,
    "LaunchByPtr": CallKind.LAUNCH,
    "MemCreate": CallKind.MALLOC,
    "MemMap": CallKind.MALLOC,
    "MemUnmap": CallKind.FREE,
    "MemRelease": CallKind.FREE,
}
_PATTERNS = (
    (re.compile(r"Launch\w*Kernel"), CallKind.LAUNCH),
    (re.compile(r"^Memcpy(?!NodeSet|NodeGet)"), CallKind.MEMCPY),
    (re.compile(r"^Memset"), CallKind.MEMSET),
    (re.compile(r"^(?:Ext)?Malloc|^Host(?:Alloc|Malloc|Register)|^Mem(?:Host)?(?:Alloc|Register)"), CallKind.MALLOC),
    (re.compile(r"^Free(?!\w*Pool)|^HostFree|^HostUnregister|^MemFree|^MemHostUnregister"), CallKind.FREE),
)  # fmt: skip

_COPY_LETTERS = re.compile(r"\b([HDAP])to([HDAP])\b")
_COPY_WORDS = re.compile(r"Copy(Host|Device)To(Host|Device)", re.IGNORECASE)
_COPY_ARROW = re.compile(r"\(\s*([\w ]+?)\s*->\s*([\w ]+?)\s*\)")
_HOST_WORDS = ("pageable", "pinned", "host")
_COPY_KINDS = {"HD": CopyKind.H2D, "DH": CopyKind.D2H, "DD": CopyKind.D2D, "HH": CopyKind.H2H, "PP": CopyKind.P2P}


def strip_suffix(name: str) -> str:
    """The name as the CUDA documentation has it: `cudaLaunchKernel_v7000` is `cudaLaunchKernel`."""
    return _RECORDER_SUFFIX.sub("", name)


@lru_cache(maxsize=4096)
def call_kind(name: str) -> CallKind:
    """The kind of a CUDA (runtime or driver) or HIP API call. OTHER for the many that do nothing of interest."""
    bare, known = _PREFIX.subn("", _ANY_SUFFIX.sub("", name))
    if not known:
        return CallKind.OTHER
    if bare in _EXACT:
        return _EXACT[bare]
    return next((kind for pattern, kind in _PATTERNS if pattern.search(bare)), CallKind.OTHER)


@lru_cache(maxsize=4096)
def copy_kind(text: str) -> CopyKind:
    """The direction that a copy's name gives: 'Memcpy HtoD (Pinned -> Device)', 'CopyDeviceToHost', 'DtoD'."""
    letters = _COPY_LETTERS.search(text)
    if letters:
        return _COPY_KINDS.get("".join(letters.groups()).replace("A", "D"), CopyKind.NONE)
    words = _COPY_WORDS.search(text)
    if words:
        return _COPY_KINDS["".join(word[0].upper() for word in words.groups())]
    arrow = _COPY_ARROW.search(text)
    if arrow:
        sides = ("H" if side.lower().startswith(_HOST_WORDS) else "D" for side in arrow.groups())
        return _COPY_KINDS["".join(sides)]
    return CopyKind.NONE


@lru_cache(maxsize=4096)
def host_memory(text: str) -> HostMemory:
    """Whether the host side of a copy was pinned, as its name tells. ROCm says 'Host': unknown."""
    lowered = text.lower()
    # 'Pageable -> Pinned' between two host buffers blocks as a pageable copy does.
    if "pageable" in lowered:
        return HostMemory.PAGEABLE
    return HostMemory.PINNED if "pinned" in lowered else HostMemory.UNKNOWN
