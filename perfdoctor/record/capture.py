"""Capture: what a training loop did, as columns of numbers, and the file it is kept in.

All times are integer nanoseconds on the clock of the recording (Unix time where the recorder gives it). Text is
interned: a `name` column holds indices into `Capture.strings`. No environment variable is ever part of a capture.
"""

from __future__ import annotations

import functools
import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from perfdoctor.errors import BrokenTraceError, NotATraceError, UnsupportedTraceError
from perfdoctor.record.capture_check import check_column, check_strings, check_tables
from perfdoctor.record.tables import (
    CallKind,
    Calls,
    Columns,
    CopyKind,
    Hits,
    HostMemory,
    Ints,
    Pauses,
    Phase,
    RangeKind,
    Ranges,
    Samples,
    Spans,
    Steps,
    StreamSyncs,
    Work,
    WorkKind,
)

SCHEMA_VERSION = 1
__all__ = [
    "SCHEMA_VERSION",
    "Bare",
    "CallKind",
    "Calls",
    "Capture",
    "Columns",
    "CopyKind",
    "Costs",
    "Environment",
    "Frame",
    "Hits",
    "HostMemory",
    "Ints",
    "Note",
    "Overhead",
    "Pauses",
    "Phase",
    "RangeKind",
    "Ranges",
    "Samples",
    "Site",
    "Spans",
    "Steps",
    "StreamSyncs",
    "Work",
    "WorkKind",
    "from_manifest",
    "is_capture",
    "read_capture",
]

_MANIFEST = "perfdoctor_capture.json"
_BARE_COLUMNS = ("step_ns", "data_ns", "samples", "micro_batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One line of somebody's code.

    `owner`: user, torch, lightning, transformers, torchmetrics, logger, perfdoctor or python (the standard library).
    """

    file: str
    line: int
    function: str
    owner: str = "user"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a call was made, innermost first.

    `frame` is the line to change: the innermost line of the user's that led to the call, or, where no user frame was
    on the stack, the innermost line outside perfdoctor. `library` is the line inside a library that made the call,
    None where the user's line made it itself. `caller` is the next user line outwards. `exact` is False where the
    line is that of the enclosing function (a trace knows no better).
    """

    frame: Frame
    library: Frame | None = None
    caller: Frame | None = None
    text: str = ""
    exact: bool = True

    @property
    def owner(self) -> str:
        """Whose code made the call."""
        return (self.library or self.frame).owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine and the versions, as far as the recording says. Never an environment variable."""

    gpu: str = ""
    num_gpus: int = 0
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    python: str = ""
    perfdoctor: str = ""
    rank: int | None = None
    world_size: int | None = None
    launch_blocking: bool | None = None  # CUDA_LAUNCH_BLOCKING was on
    anomaly_mode: bool | None = None
    sync_debug_mode: int | None = None
    num_cpus: float | None = None  # what the process may use: affinity and cgroup quota
    num_workers: int | None = None  # of the DataLoader, where a door saw it
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    fused_optimizer: bool | None = None
    peak_memory_bytes: int | None = None
    memory_bytes: int | None = None  # of the GPU
    pinned_h2d_bytes_per_s: int | None = None  # measured at the start of a live session
    compute_capability: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something about the recording that its reader must know: repaired, skipped, not recorded."""

    code: str
    text: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What being traced costs the host. `measured` is False for the defaults.

    `call_ns` for each CUDA call; in recordings with ops, `full_share` of every short host segment (everything in it is
    traced: calls, ops, frames), and for each op and frame a fixed cost in long ones (a loader, a polling loop).
    Defaults, from three host-bound loops recorded on an H200 and run bare: 0.6 to 10.5 us a CUDA call (the host itself
    was up to twice as fast from one run to the next); 0.46 to 0.60 of the short segments of a full recording.
    """

    call_ns: int = 5_000
    op_ns: int = 3_000
    frame_ns: int = 300
    light_share: float = (
        0.0  # of what is left of a short host segment: caches that the tracer took; fitted, not measured
    )
    builtin_ns: int = 0  # frames of C functions: cheap, and a polling loop makes thousands
    full_share: float = 0.54
    measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """Step times with nothing hooked and nothing traced: the truth that traced times are held against."""

    step_ns: Ints  # (n,) CUDA-event time between step ends, or host time without CUDA
    data_ns: Ints  # (n,) host time in the loader of the same step
    samples: Ints  # (n,), -1 where unknown
    micro_batches: Ints  # (n,)
    clock: str = "cuda-event"  # or "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Measured slow-down of one phase of a live session against its bare phase."""

    phase: str
    ratio: float  # 0.02 is 2 % slower
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A recording. Tables are empty where the recorder gave nothing; `notes` says what was not recorded."""

    source: str  # 'torch.profiler', 'nsys', 'session'
    calls: Calls = field(default_factory=Calls.empty)
    work: Work = field(default_factory=Work.empty)
    ops: Spans = field(default_factory=Spans.empty)
    frames: Spans = field(default_factory=Spans.empty)
    ranges: Ranges = field(default_factory=Ranges.empty)
    stream_syncs: StreamSyncs = field(default_factory=StreamSyncs.empty)
    steps: Steps = field(default_factory=Steps.empty)
    hits: Hits = field(default_factory=Hits.empty)
    pauses: Pauses = field(default_factory=Pauses.empty)
    samples: Samples = field(default_factory=Samples.empty)
    strings: tuple[str, ...] = ()
    sites: tuple[Site, ...] = ()
    optimizers: tuple[Site, ...] = ()  # where the loop's optimizers were built, as far as a live session saw it
    environment: Environment = field(default_factory=Environment)
    costs: Costs = field(default_factory=Costs)
    notes: tuple[Note, ...] = ()
    overheads: tuple[Overhead, ...] = ()
    bare: Bare | None = None
    full: Capture | None = None  # the recording with names (ops, frames) beside this light one
    path: str = ""

    def text(self, index: int) -> str:
        """The string behind a `name` or `kind` index; '' for -1."""
        return self.strings[index] if 0 <= index < len(self.strings) else ""

    def matching(self, predicate: Any) -> NDArray[np.bool_]:
        """A mask over `strings`: True where `predicate(text)` holds. Index it with a `name` column."""
        return np.fromiter((bool(predicate(s)) for s in self.strings), bool, len(self.strings))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the capture as one compressed file, whole or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        target = Path(path)
        partial = target.with_name(target.name + ".part")
        try:
            with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
                manifest = self.manifest(functools.partial(_write_array, archive))
                archive.writestr(_MANIFEST, json.dumps(manifest, allow_nan=False))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    TABLES: ClassVar[dict[str, type[Columns]]] = {
        "calls": Calls, "work": Work, "ops": Spans, "frames": Spans, "ranges": Ranges, "stream_syncs": StreamSyncs,
        "steps": Steps, "hits": Hits, "pauses": Pauses, "samples": Samples,
    }  # fmt: skip

    def manifest(self, write: Callable[[str, Ints], None], prefix: str = "") -> dict[str, Any]:
        """All that is no column, ready for JSON; each column goes to `write(name, values)`."""
        for table in self.TABLES:
            for column, values in getattr(self, table).columns().items():
                write(f"{prefix}{table}.{column}.npy", values)
        bare = None
        if self.bare is not None:
            for name in _BARE_COLUMNS:
                write(f"{prefix}bare.{name}.npy", getattr(self.bare, name))
            bare = self.bare.clock
        return {
            "schema_version": SCHEMA_VERSION,
            "source": self.source,
            "strings": self.strings,
            "sites": [asdict(site) for site in self.sites],
            "optimizers": [asdict(site) for site in self.optimizers],
            "environment": asdict(self.environment),
            "costs": asdict(self.costs),
            "notes": [asdict(note) for note in self.notes],
            "overheads": [asdict(overhead) for overhead in self.overheads],
            "bare": bare,
            "full": self.full.manifest(write, prefix + "full.") if self.full is not None else None,
        }


def is_capture(head: bytes) -> bool:
    """Whether a file that begins with these bytes may be a saved capture (a zip archive)."""
    return head.startswith(b"PK\x03\x04")


def read_capture(path: str | os.PathLike[str]) -> Capture:
    """Read a file that `Capture.save` wrote.

    Raises:
        NotATraceError: the file is an archive of something else.
        UnsupportedTraceError: a newer perfdoctor wrote it.
        BrokenTraceError: it is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if _MANIFEST not in archive.namelist():
                raise NotATraceError(f"{path}: a zip archive, but no perfdoctor capture (it holds no {_MANIFEST})")
            manifest = json.loads(archive.read(_MANIFEST))
            if not isinstance(manifest, dict):
                raise ValueError("its manifest is no JSON object")
            version = manifest.get("schema_version")
            if version != SCHEMA_VERSION:
                raise UnsupportedTraceError(
                    f"{path}: capture schema {version}; this perfdoctor reads schema {SCHEMA_VERSION}. "
                    "Use the perfdoctor that wrote it, or record again."
                )
            return replace(from_manifest(manifest, functools.partial(_read_array, archive)), path=str(path))
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, TypeError, EOFError, RuntimeError) as error:
        raise BrokenTraceError(f"{path}: a damaged perfdoctor capture ({error}). Record it again.") from error


def from_manifest(manifest: dict[str, Any], read: Callable[[str], Ints], prefix: str = "") -> Capture:
    """What `Capture.manifest` wrote; `read(name)` gives each column."""

    def columns(table: str, cls: type[Columns]) -> Columns:
        return cls(**{f.name: read(f"{prefix}{table}.{f.name}.npy") for f in fields(cls)})

    strings = check_strings(manifest["strings"])
    tables: dict[str, Any] = {name: columns(name, cls) for name, cls in Capture.TABLES.items()}
    check_tables(tables, len(strings), len(manifest["sites"]))
    bare = None
    if manifest["bare"] is not None:
        arrays = {name: read(f"{prefix}bare.{name}.npy") for name in _BARE_COLUMNS}
        bare = Bare(clock=manifest["bare"], **arrays)
    full = from_manifest(manifest["full"], read, prefix + "full.") if manifest["full"] else None
    return Capture(
        source=manifest["source"],
        strings=strings,
        sites=tuple(_site(row) for row in manifest["sites"]),
        optimizers=tuple(_site(row) for row in manifest.get("optimizers", ())),
        environment=Environment(**manifest["environment"]),
        costs=Costs(**manifest["costs"]),
        notes=tuple(Note(**row) for row in manifest["notes"]),
        overheads=tuple(Overhead(**row) for row in manifest["overheads"]),
        bare=bare,
        full=full,
        **tables,
    )


def _site(row: dict[str, Any]) -> Site:
    frames = {key: Frame(**row[key]) if row[key] else None for key in ("frame", "library", "caller")}
    return Site(text=row["text"], exact=row["exact"], **frames)  # type: ignore[arg-type]


def _write_array(archive: zipfile.ZipFile, name: str, values: Ints) -> None:
    # Times rise and repeat their high bytes: differences compress three to four times better than the values.
    buffer = io.BytesIO()
    np.save(buffer, np.diff(values, prepend=0).astype(np.int64), allow_pickle=False)
    archive.writestr(name, buffer.getvalue())


def _read_array(archive: zipfile.ZipFile, name: str) -> Ints:
    return np.cumsum(check_column(np.load(io.BytesIO(archive.read(name)), allow_pickle=False)), dtype=np.int64)
