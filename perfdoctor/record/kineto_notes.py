"""What the reader of a Kineto trace must know about it: repaired, skipped, not recorded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from perfdoctor.record.capture import CallKind, Calls, Capture, Note
from perfdoctor.record.event_columns import EventColumns
from perfdoctor.record.row_notes import row_notes
from perfdoctor.units import format_plural

_REPAIRS = {
    "escape": ("repaired-escapes", "texts had backslashes that escape nothing (Windows paths); taken as they stand"),
    "control": ("repaired-control-characters", "events had raw control characters in names"),
    "utf8": ("repaired-utf8", "events had bytes that are not UTF-8; shown as \ufffd"),
    "number": ("repaired-numbers", "events had NaN or Infinity, which JSON does not know; taken as missing"),
    "comma": ("repaired-commas", "events had a comma too many"),
    "quote": ("repaired-quotes", "events had unescaped quotes in names"),
    "key": ("repaired-keys", "events had a key without its opening quote"),
}
_HARMLESS = {
    "Trace", "gpu_user_annotation", "overhead", "cpu_instant_event", "cuda_profiler_range", "external_correlation",
    "fwdbwd", "async_cpu_to_gpu", "ac2g", "cuda_event", "collective_comm", "gpu_pm_counter",
}  # fmt: skip
_MOST_NAMED = 3


def notes_of(capture: Capture, events: EventColumns, num_stray: int, truncated: str) -> tuple[Note, ...]:
    """The notes of a capture that is otherwise complete. `truncated` says how the file ended early, '' if not."""
    return tuple(chain_notes(capture, events, num_stray, truncated))


def chain_notes(capture: Capture, events: EventColumns, num_stray: int, truncated: str) -> Iterator[Note]:
    """See `notes_of`."""
    if truncated:
        yield Note(code="truncated", text=f"the file is truncated: {truncated}; every complete event was read")
    for kind, count in events.repairs.counts.items():
        code, text = _REPAIRS[kind]
        yield Note(code=code, text=_counted(count, text), count=count)
    skipped = events.num_broken + events.repairs.skipped + num_stray
    if skipped:
        text = _counted(skipped, "events were skipped: no or negative duration, no start, null, or damaged past repair")
        yield Note(code="skipped-events", text=text, count=skipped)
    yield from _missing(capture)
    yield from row_notes(capture)
    other = sum(count for cat, count in events.ignored.items() if _is_accelerator(cat))
    if other:
        yield Note(
            code="other-accelerator",
            text=f"{format_plural(other, 'event')} of an accelerator that is neither CUDA nor ROCm not read",
            count=other,
        )
    unknown = Counter({c: n for c, n in events.ignored.items() if c not in _HARMLESS and not _is_accelerator(c)})
    if unknown:
        named = ", ".join(cat[:40] for cat, _ in unknown.most_common(_MOST_NAMED))
        named += ", ..." if len(unknown) > _MOST_NAMED else ""
        text = f"{format_plural(unknown.total(), 'event')} of other categories than torch.profiler's not read: {named}"
        yield Note(code="unknown-categories", text=text, count=unknown.total())


def _counted(count: int, text: str) -> str:
    """'3 events had ...', '1 event had ...'."""
    if count == 1:
        noun, _, rest = text.partition(" ")
        return f"1 {noun.removesuffix('s')} {re.sub('^were ', 'was ', rest)}"
    return f"{count} {text}"


def _is_accelerator(cat: str) -> bool:
    return cat not in _HARMLESS and cat.startswith(("mtia", "xpu", "hpu", "privateuse1", "tpu", "npu", "glow"))


def _missing(capture: Capture) -> Iterator[Note]:
    if not len(capture.work):
        yield Note(code="no-device-rows", text="no kernels or copies were recorded: device time cannot be judged")
    if not len(capture.steps):
        yield Note(code="no-steps", text="no steps are marked (ProfilerStep#N)")
    lost = launches_without_work(capture.calls, capture)
    if lost:
        text = f"no kernel row for {format_plural(lost, 'launch')} at the start: lost by the recorder, no idle time"
        yield Note(code="missing-kernels", text=text, count=lost)
    orphans = int((~np.isin(capture.work.correlation, capture.calls.correlation)).sum())
    if orphans and len(capture.calls):
        text = (
            f"{orphans} of {len(capture.work)} kernels and copies came without the call that launched them "
            "(most often: launched before the recording began)"
        )
        yield Note(code="missing-launches", text=text, count=orphans)


def launches_without_work(calls: Calls, capture: Capture) -> int:
    """Launches before the first one whose work was recorded."""
    launches = np.isin(calls.kind, (CallKind.LAUNCH, CallKind.MEMCPY, CallKind.MEMSET, CallKind.GRAPH_LAUNCH))
    paired = launches & np.isin(calls.correlation, capture.work.correlation)
    if not paired.any():
        return 0
    return int((launches & (calls.start_ns < calls.start_ns[paired].min())).sum())


def counted(notes: tuple[Note, ...]) -> Counter[str]:
    """Note codes with their counts."""
    return Counter({note.code: note.count for note in notes})
