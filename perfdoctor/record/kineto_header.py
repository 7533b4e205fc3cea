"""What stands around the events of a Kineto trace: clock base, devices, versions, rank."""

from __future__ import annotations

import json
from typing import Any

from perfdoctor.record.capture import Environment
from perfdoctor.record.event_repair import Repairs

Header = dict[str, Any]
_LARGEST_BASE_NS = 1 << 62  # the year 2116; more would not leave room for the events' own times


def read_header(before: bytes, after: bytes) -> Header:
    """The file's own keys, without the events. What cannot be read is left out: the events count more."""
    opening = before.removeprefix(b"\xef\xbb\xbf").strip()
    if not opening.startswith(b"{"):
        return {}
    # `before` ends with the bracket that opens the array.
    for whole in (before + b"]" + after, before + b"]}", b'{"traceEvents":[]' + after):
        repairs = Repairs()
        value = repairs.load(whole.removeprefix(b"\xef\xbb\xbf"))
        if isinstance(value, dict):
            return value
    return {}


def clock_base_ns(header: Header) -> int:
    """What to add to the times of the events: nanoseconds since the epoch where the file says so."""
    base = _whole(header.get("baseTimeNanoseconds")) or 0
    return base if 0 <= base < _LARGEST_BASE_NS else 0


def environment_of(header: Header, device: int | None) -> Environment:
    """The machine as the file describes it. `device` is the one that did the work; None where none did."""
    devices = [row for row in _as_list(header.get("deviceProperties")) if isinstance(row, dict)]
    chosen = next((row for row in devices if row.get("id") == device), devices[0] if devices else {})
    spread = header.get("distributedInfo")
    spread = spread if isinstance(spread, dict) else {}
    capability = (chosen.get("computeMajor"), chosen.get("computeMinor"))
    return Environment(
        gpu=str(chosen.get("name") or ""),
        num_gpus=len(devices),
        cuda=_cuda_version(header.get("cuda_runtime_version")) or _hip_version(header.get("hip_runtime_version")),
        torch=str(header.get("pytorch_version") or header.get("torch_version") or ""),
        rank=_counted(spread.get("rank")),  # -1 where no process group was made
        world_size=_counted(spread.get("world_size")),
        memory_bytes=_whole(chosen.get("totalGlobalMem")),
        compute_capability=f"{capability[0]}.{capability[1]}" if None not in capability else "",
    )


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str):  # some tools keep the list as text
        try:
            value = json.loads(value)
        except ValueError:
            return []
    return value if isinstance(value, list) else []


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _counted(value: Any) -> int | None:
    number = _whole(value)
    return number if number is not None and number >= 0 else None


def _cuda_version(value: Any) -> str:
    number = _whole(value)
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _hip_version(value: Any) -> str:
    number = _whole(value)
    return f"HIP {number // 10_000_000}.{number // 100_000 % 100}" if number else ""
