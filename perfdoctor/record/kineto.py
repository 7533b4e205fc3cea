"""torch.profiler's JSON (Kineto, and the autograd profiler's list before it) to a Capture, streamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfdoctor.errors import BrokenTraceError, NotATraceError
from perfdoctor.record.byte_stream import ByteStream
from perfdoctor.record.capture import Calls, Capture, Costs, Ranges, Spans, StreamSyncs, Work
from perfdoctor.record.correlations import fill_external, make_unique
from perfdoctor.record.cuda_names import call_kind
from perfdoctor.record.devices import busiest_device
from perfdoctor.record.duplicates import drop_duplicates, duplicates_note
from perfdoctor.record.event_columns import EventColumns
from perfdoctor.record.event_halves import Progress, read_events
from perfdoctor.record.event_repair import Repairs, split_tail
from perfdoctor.record.kineto_header import Header, clock_base_ns, environment_of, read_header
from perfdoctor.record.kineto_notes import notes_of
from perfdoctor.record.processes import numbered, several_processes
from perfdoctor.record.step_ranges import ANNOTATION, range_kinds, steps_of

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
    events.close_pairs()
    found = events.finish()
    if events.num_broken and not any(len(table["start_ns"]) for table in found.values()):
        raise BrokenTraceError(
            f"{path}: none of its {events.num_broken} events has a time and a length that make sense (microseconds are "
            "expected). Record it again."
        )
    tables: dict[str, Table] = {
        name: found.get(name) or {column: np.empty(0, np.int64) for column in columns}
        for name, columns in _COLUMNS.items()
    }
    num_processes = _separate_processes(tables, events)
    num_stray = _drop_stray(tables)
    stacks = events.stacks.frames()
    if len(stacks["name"]):
        tables["frames"] = {name: np.concatenate((tables["frames"][name], stacks[name])) for name in _SPAN}
    strings = events.strings.strings
    _move_annotations(tables, strings)
    num_twice = _link(tables, strings)
    base = clock_base_ns(header)
    for table in tables.values():
        table["start_ns"] += base
        table["end_ns"] += base
    capture = _capture(path, tables, header, strings, Costs(frame_ns=0) if len(stacks["name"]) else Costs())
    notes = list(notes_of(capture, events, num_stray, truncated))
    notes += [duplicates_note(num_twice)] if num_twice else []
    notes += [several_processes(num_processes)] if num_processes > 1 else []
    return replace(capture, notes=tuple(notes))


def _separate_processes(tables: dict[str, Table], events: EventColumns) -> int:
    """Thread numbers of their own for each process, where the file holds several. Returns how many it holds."""
    number = events.num_processes()
    if number > 1:
        hosts = [name for name in ("calls", "ops", "frames", "ranges") if len(tables[name]["thread"])]
        process = np.concatenate([events.processes(name) for name in hosts])
        thread = numbered(process, np.concatenate([tables[name]["thread"] for name in hosts]))
        bounds = np.cumsum([len(tables[name]["thread"]) for name in hosts])[:-1]
        for name, own in zip(hosts, np.split(thread, bounds), strict=True):
            tables[name]["thread"] = own
    return number


def _capture(path: Path, tables: dict[str, Table], header: Header, strings: list[str], costs: Costs) -> Capture:
    kinds, numbers = range_kinds(strings, tables["ranges"]["name"], tables["ranges"]["thread"])
    tables["ranges"]["kind"] = kinds
    ranges = Ranges.of(tables["ranges"])
    work = tables["work"]
    busiest = busiest_device(work["device"], work["start_ns"], work["end_ns"])
    return Capture(
        source="torch.profiler",
        calls=Calls.of(tables["calls"]),
        work=Work.of(work),
        ops=Spans.of(tables["ops"]),
        frames=Spans.of(tables["frames"]),
        ranges=ranges,
        stream_syncs=StreamSyncs.of(tables["stream_syncs"]),
        steps=steps_of(ranges, numbers),
        strings=tuple(strings),
        environment=environment_of(header, busiest),
        costs=costs,
        path=str(path),
    )


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


def _link(tables: dict[str, Table], strings: list[str]) -> int:
    """Kinds of calls and unique correlations. Returns how many rows were in the file twice."""
    kinds = np.array([int(call_kind(s)) for s in strings] or [0], np.int64)
    tables["calls"]["kind"] = kinds[tables["calls"]["name"]]
    num_twice = drop_duplicates(tables)
    fill_external(tables["calls"], tables["work"])
    make_unique(tables["calls"], tables["work"], tables["stream_syncs"])
    return num_twice
