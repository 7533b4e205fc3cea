"""Readers held against independent ones: a case's expected figures, the standard JSON parser, SQL, nsys and HTA."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shutil
import sqlite3
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from perfdoctor.errors import CaptureError
from perfdoctor.record.capture import Capture, HostMemory, WorkKind
from perfdoctor.record.load import load_capture
from perfdoctor.record.summary import summarise

Tally = Counter[tuple[str, str]]

_GROUPS = {
    "cuda_runtime": "calls", "cuda_driver": "calls", "Runtime": "calls",
    "kernel": "kernel", "Kernel": "kernel", "gpu_memcpy": "memcpy", "Memcpy": "memcpy",
    "gpu_memset": "memset", "Memset": "memset", "cpu_op": "host", "Operator": "host", "user_annotation": "host",
    "python_function": "frames", "cuda_sync": "stream_syncs",
}  # fmt: skip


def check_case(folder: Path, file: str, expected: dict[str, Any]) -> list[str]:
    """What a case's file gives other than expected. `expected` is the whole expected.json."""
    truth = expected["truth"]
    if isinstance(truth, dict) and all(isinstance(value, dict) for value in truth.values()):
        known = truth.get(file)
        refusable = known is None
    else:
        known, refusable = truth, truth is None
    try:
        capture = load_capture(folder / file)
    except CaptureError as error:
        return _judge_refusal(file, error, refusable)
    if truth is None:
        return ["was read, and should have been refused"]
    return [*_compare(summarise(capture), known or {}), *_judge_extras(capture, expected)]


def _judge_refusal(file: str, error: CaptureError, refusable: bool) -> list[str]:
    if not refusable:
        return [f"refused: {error}"]
    return [] if file in str(error) else [f"the error does not name the file: {error}"]


def _compare(found: dict[str, Any], truth: dict[str, Any]) -> list[str]:
    return [
        f"{key}: {found[key]}, expected {value}" for key, value in truth.items() if key in found and found[key] != value
    ]


def _judge_extras(capture: Capture, expected: dict[str, Any]) -> list[str]:
    problems = []
    path = expected.get("must_contain_path")
    if path and not any(path in text for text in capture.strings):
        problems.append(f"the path {path} is not among the names")
    skipped = sum(note.count for note in capture.notes if note.code == "skipped-events")
    if skipped < expected.get("skipped_at_least", 0):
        problems.append(f"{skipped} events skipped, expected at least {expected['skipped_at_least']}")
    if "rank" in expected and capture.environment.rank != expected["rank"]:
        problems.append(f"rank {capture.environment.rank}, expected {expected['rank']}")
    return problems


def check_kineto(path: Path, capture: Capture) -> list[str]:
    """Counts, duration sums (ns) and names of every table, against `json.loads` of the whole file."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        document = json.loads(file.read())
    events = document if isinstance(document, list) else document["traceEvents"]
    wanted: Counter[str] = Counter()
    durations: Counter[str] = Counter()
    names: Tally = Counter()
    for event in events:
        group = _GROUPS.get(event.get("cat", "")) if event.get("ph") == "X" else None
        if group:
            wanted[group] += 1
            durations[group] += round(event["dur"] * 1000)
            names[group, event["name"]] += 1
    return _compare_tallies(capture, wanted, durations, names)


def _compare_tallies(capture: Capture, wanted: Counter[str], durations: Counter[str], names: Tally) -> list[str]:
    problems = []
    for group in sorted(set(_GROUPS.values())):
        start, end, name = _group_columns(capture, group)
        if group == "frames" and not wanted["frames"]:
            continue  # then they are made from the call stacks of the ops
        if len(start) != wanted[group]:
            problems.append(f"{group}: {len(start)} rows, expected {wanted[group]}")
        if int((end - start).sum()) != durations[group]:
            problems.append(f"{group}: {int((end - start).sum())} ns in all, expected {durations[group]}")
        found = Counter(capture.text(int(i)) for i in name)
        if name.size and found != Counter({text: count for (kind, text), count in names.items() if kind == group}):
            problems.append(f"{group}: names differ")
    return problems


def _group_columns(capture: Capture, group: str) -> tuple[Any, Any, Any]:
    work = capture.work
    if group in ("kernel", "memcpy", "memset"):
        rows = work.take(work.kind == WorkKind[group.upper()])
        return rows.start_ns, rows.end_ns, rows.name
    if group == "host":
        names = ("start_ns", "end_ns", "name")
        start, end, name = (np.concatenate([getattr(capture.ops, n), getattr(capture.ranges, n)]) for n in names)
        return start, end, name
    table = getattr(capture, group)
    return table.start_ns, table.end_ns, getattr(table, "name", np.empty(0, np.int64))


def check_export(path: Path, capture: Capture) -> list[str]:
    """Counts and durations of an Nsight export against plain SQL; secrets against the names that were kept."""
    problems = []
    with sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True) as connection:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        for table, kind in (("KERNEL", 0), ("MEMCPY", 1), ("MEMSET", 2), ("RUNTIME", None)):
            name = f"CUPTI_ACTIVITY_KIND_{table}"
            count, total = (0, 0)
            if name in tables:
                query = f"SELECT COUNT(*), COALESCE(SUM(end - start), 0) FROM {name}"
                count, total = connection.execute(query).fetchone()
            rows = capture.calls if kind is None else capture.work.take(capture.work.kind == kind)
            if (len(rows), int((rows.end_ns - rows.start_ns).sum())) != (count, total):
                problems.append(f"{table}: {len(rows)} rows, expected {count} with {total} ns")
        if "META_DATA_CAPTURE" in tables:
            query = "SELECT value FROM META_DATA_CAPTURE WHERE name LIKE '%ENVIRONMENT%'"
            secrets = {str(row[0]) for row in connection.execute(query)} - {""}
            leaked = secrets & set(capture.strings)
            problems += [f"{len(leaked)} environment variables among the names"] if leaked else []
    return problems


def check_nsys(path: Path, capture: Capture) -> list[str] | None:
    """Busy share and span of each device, sync calls and pageable copies against `nsys analyze`.

    None without nsys, or with one older than these rules (2022.4 has none of that name).
    """
    nsys = shutil.which("nsys")
    if nsys is None:
        return None
    rules = ("gpu_time_util:chunks=1:threshold=101", "cuda_api_sync:rows=-1", "cuda_memcpy_async:rows=-1")
    with tempfile.TemporaryDirectory(prefix="perfdoctor-") as folder:
        copy = Path(shutil.copy(path, folder))
        answers = [_analyze(nsys, copy, rule) for rule in rules]
    if any(answer is None for answer in answers):
        return None
    busy, syncs, copied = (answer or [] for answer in answers)
    copies = [row for row in copied if "Pageable" in row.values()]
    summary = summarise(capture)
    found = sorted(
        (f"{100 * d['gpu_busy_us'] / d['gpu_span_us']:.1f}", d["gpu_span_us"]) for d in summary["devices"].values()
    )
    wanted = sorted((row["In-Use (%)"], int(row["Duration (ns)"]) / 1000) for row in busy)
    # nsys lists a copy through its API call: one whose call lies outside the recording is not listed.
    called = np.isin(capture.work.correlation, capture.calls.correlation)
    pageable = int(((capture.work.memory == HostMemory.PAGEABLE) & called).sum())
    pairs = (
        ("busy", found, wanted),
        ("syncs", summary["syncs"], len(syncs)),
        ("pageable copies", pageable, len(copies)),
    )
    return [f"{name}: {ours}, nsys prints {theirs}" for name, ours, theirs in pairs if ours != theirs]


def _analyze(nsys: str, path: Path, rule: str) -> list[dict[str, str]] | None:
    """The rows that a rule prints; None where this nsys has no such rule."""
    command = [nsys, "analyze", "-q", "-r", rule, "--format", "csv", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if re.search(r"(Report|Rule) '[\w-]+' could not be found", done.stdout + done.stderr):
        return None
    lines = [line for line in done.stdout.splitlines() if "," in line and not line.startswith("Processing")]
    return list(csv.DictReader(lines))
