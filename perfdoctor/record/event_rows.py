"""The shapes that rows of a trace are decoded into: only the fields that are used, and any type where files differ."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import msgspec

NO_ARGS = msgspec.Raw(b"null")


class Event(msgspec.Struct, gc=False):
    """One row of `traceEvents`. A field that is missing keeps its default, and NaN marks a missing time."""

    ph: str = ""
    cat: str = ""
    name: Any = ""
    pid: Any = -1
    tid: Any = -1
    ts: float = math.nan
    dur: float = math.nan
    args: msgspec.Raw = NO_ARGS


class ExactEvent(Event, gc=False):
    """An event whose start must not be rounded."""

    ts: Any = math.nan


class Args(msgspec.Struct, gc=False):
    """The arguments that the tables hold. Any of them may be missing or of another type."""

    correlation: Any = -1
    external_id: Any = msgspec.field(default=-1, name="External id")
    external_id_2021: Any = msgspec.field(default=-1, name="external id")
    device: Any = None
    stream: Any = None
    bytes: Any = -1
    grid: Any = None
    kind: Any = None
    cuda_sync_kind: Any = None
    record_correlation: Any = msgspec.field(default=-1, name="wait_on_cuda_event_record_corr_id")
    call_stack: Any = msgspec.field(default=None, name="Call stack")


ROWS = msgspec.json.Decoder(list[Event])
EXACT_ROW = msgspec.json.Decoder(ExactEvent, float_hook=Decimal)
EXACT_ROWS = msgspec.json.Decoder(list[ExactEvent], float_hook=Decimal)
ARGS = msgspec.json.Decoder(list[Args | None])
ONE_ARGS = msgspec.json.Decoder(Args | None)


def coerced(value: dict[str, Any]) -> Event:
    """An event from a repaired dict, whatever types its fields have."""
    args = value.get("args")
    return ExactEvent(
        ph=str(value.get("ph", "")),
        cat=str(value.get("cat") or ""),
        name=value.get("name", ""),
        pid=value.get("pid", -1),
        tid=value.get("tid", -1),
        ts=_number(value.get("ts")),
        dur=_number(value.get("dur")),
        args=msgspec.Raw(json.dumps(args).encode()) if isinstance(args, dict) else NO_ARGS,
    )


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
