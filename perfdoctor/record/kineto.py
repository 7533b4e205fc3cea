"""torch.profiler's JSON (Kineto, and the autograd profiler's list before it) to a Capture, streamed."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from perfdoctor.errors import BrokenTraceError, NotATraceError
from perfdoctor.record.byte_stream import ByteStream
from perfdoctor.record.capture import Calls, Capture, Columns, Costs, Ranges, Spans, StreamSyncs, Work
from perfdoctor.record.correlations import fill_external, make_unique
from perfdoctor.record.cuda_names import call_kind
from perfdoctor.record.event_columns import EventColumns
from perfdoctor.record.event_halves import Progress, read_events
from perfdoctor.record.event_repair import Repairs, split_tail
from perfdoctor.record.kineto_header import Header, clock_base_ns, environment_of, read_header
from perfdoctor.record.kineto_notes import notes_of
from perfdoctor.record.step_ranges import ANNOTATION, range_kinds, steps_of

T = TypeVar("T", bound=Columns)
Table = dict[str, NDArray[np.int64]]
_HOUR_NS = 3_600_000_000_000
_SPAN = ("start_ns", "end_ns", "thread", "name")
_COLUMNS: dict[str, tuple[str, ...]] = {
    "calls": (*_SPAN, "correlation", "external"),
    "work": (
        "start_ns", "end_ns", "device", "stream", "name", "kind", "correlation", "external",
        "num_bytes", "copy", "memory", "blocks",
    ),
    "ops": _SPAN,
    "frames": _SPAN,
    "ranges": _SPAN,
    "stream_syncs": ("start_ns", "end_ns", "kind", "stream", "correlation", "record_correlation"),
}  # fmt: skip


def read_kineto(path: Path, progress: Progress | None = None) -> Capture:
    """Read a trace of torch.profiler, plain or gzip. `progress` is called with the fraction read, 0 to 1.

    Raises:
        NotATraceError: the JSON holds no list of events.
        BrokenTraceError: nothing in it can be read.
        OSError: the file cannot be opened.
    """
    stream, blocks, events = read_events(path, progress)
    if not blocks.found:
        raise NotATraceError(_describe_no_events(path, stream))
    footer, truncated = _read_tail(events, blocks.tail)
    if events.repairs.skipped and not events.num_events:
        raise BrokenTraceError(f"{path}: none of its {events.repairs.skipped} events can be read. Record it again.")
    if truncated and not events.num_events:
        raise NotATraceError(
            f"{path}: the list in it holds no trace event, whole or at all. "
            "Expected what torch.profiler's export_chrome_trace writes; record or copy it again."
        )
    header = read_header(blocks.header, footer)
    return _assemble(path, events, header, stream.damage or truncated)


def _describe_no_events(path: Path, stream: ByteStream) -> str:
    damage = f" ({stream.damage})" if stream.damage else ""
    return f"{path}: no traceEvents in it{damage}. Expected what torch.profiler's export_chrome_trace writes."


def _read_tail(events: EventColumns, tail: bytes) -> tuple[bytes, str]:
    """Take in the last event and find the footer: (footer, how the file was cut short or '')."""
    for last, footer in split_tail(tail):
        if events.try_block(b"[%b]" % last):
            return footer, ""
    rest = tail.strip().removesuffix(b",")
    if events.try_block(b"[%b]" % rest):
        return b"}", "the list of events is not closed"
    for last, footer in split_tail(tail):
        if isinstance(Repairs().load(last), dict):
            events.add_block(b"[%b]" % last)
            return footer, ""
    return b"}", "it ends inside an event, which was dropped"


def _assemble(path: Path, events: EventColumns, header: Header, truncated: str) -> Capture:
    found = events.finish()
    tables: dict[str, Table] = {
        name: found.get(name) or {column: np.empty(0, np.int64) for column in columns}
        for name, columns in _COLUMNS.items()
    }
    num_stray = _drop_stray(tables)
    stacks = events.stacks.frames()
    if len(stacks["name"]):
        tables["frames"] = {name: np.concatenate((tables["frames"][name], stacks[name])) for name in _SPAN}
    strings = events.strings.strings
    _move_annotations(tables, strings)
    _link(tables, strings)
    base = clock_base_ns(header)
    for table in tables.values():
        table["start_ns"] += base
        table["end_ns"] += base
    capture = _capture(path, tables, header, strings, Costs(frame_ns=0) if len(stacks["name"]) else Costs())
    return replace(capture, notes=notes_of(capture, events, num_stray, truncated))


def _capture(path: Path, tables: dict[str, Table], header: Header, strings: list[str], costs: Costs) -> Capture:
    kinds, numbers = range_kinds(strings, tables["ranges"]["name"], tables["ranges"]["thread"])
    tables["ranges"]["kind"] = kinds
    ranges = _table(Ranges, tables["ranges"])
    devices, counts = np.unique(tables["work"]["device"], return_counts=True)
    return Capture(
        source="torch.profiler",
        calls=_table(Calls, tables["calls"]),
        work=_table(Work, tables["work"]),
        ops=_table(Spans, tables["ops"]),
        frames=_table(Spans, tables["frames"]),
        ranges=ranges,
        stream_syncs=_table(StreamSyncs, tables["stream_syncs"]),
        steps=steps_of(ranges, numbers),
        strings=tuple(strings),
        environment=environment_of(header, int(devices[counts.argmax()]) if len(devices) else None),
        costs=costs,
        path=str(path),
    )


def _table(cls: type[T], columns: Table) -> T:
    return cls(**{field.name: columns[field.name] for field in fields(cls)})


def _drop_stray(tables: dict[str, Table]) -> int:
    """Drop rows that start at 0 on a clock that is far from it: events that were opened and never closed."""
    starts = [table["start_ns"] for table in tables.values()]
    others = min((int(s[s != 0].min()) for s in starts if (s != 0).any()), default=0)
    if others < _HOUR_NS:
        return 0
    count = 0
    for name, table in tables.items():
        keep = table["start_ns"] != 0
        if not keep.all():
            count += int((~keep).sum())
            tables[name] = {column: values[keep] for column, values in table.items()}
    return count


def _move_annotations(tables: dict[str, Table], strings: list[str]) -> None:
    """Files of 2021 keep steps and the profiler's own annotations among the operators: move them to the ranges."""
    marked = np.fromiter((ANNOTATION.match(s) is not None for s in strings), bool, len(strings))
    ops = tables["ops"]
    moved = marked[ops["name"]] if len(strings) else np.zeros(0, bool)
    if moved.any():
        tables["ranges"] = {c: np.concatenate((tables["ranges"][c], ops[c][moved])) for c in _SPAN}
        tables["ops"] = {c: ops[c][~moved] for c in _SPAN}


def _link(tables: dict[str, Table], strings: list[str]) -> None:
    kinds = np.array([int(call_kind(s)) for s in strings] or [0], np.int64)
    calls = tables["calls"]
    calls["kind"] = kinds[calls["name"]]
    fill_external(calls, tables["work"])
    make_unique(calls, tables["work"], tables["stream_syncs"])
