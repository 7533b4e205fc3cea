"""Treatments that were tried, as text and JSON: those to keep first, the others with the reason, the lines to change.

The JSON (`verdicts_schema.json`) has the keys

    schema_version  1. It rises when a key changes its meaning or goes away; new keys may appear without.
    kind            "treatments"
    perfdoctor, source, environment   as in a report
    verdicts        ranked: accepted ones by what they save. Each: treatment, accepted, reason, parity (kept, text,
                    difference, repeat, num_losses), before, after (median_ms, low_ms, high_ms: quartiles of blocks),
                    speed_up (mid, low, high: 95 % interval), saving (mid_ms, low_ms, high_ms, num_pairs),
                    peak_memory_before_bytes, peak_memory_after_bytes, lines, cures. null where not measured.
                    num_processes: that ran the script from its start for it, 0 where blocks of steps in one process
                    sufficed; why_processes: why they did not.
                    cures: the findings that it is for, with what replay had predicted (predicted_ms).
    best            the name of the verdict to keep, or null
    lines           what to write for it
    again           the command that goes on with what the time did not suffice for, or null
    notes           what a reader must know: files that were thrown away, an emulated device
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.resources import files
from statistics import median
from typing import Any

from perfdoctor.diagnose.finding import Diagnosis, Finding
from perfdoctor.report import phrases
from perfdoctor.report.json import site_document, step_document
from perfdoctor.report.lines import Line, command_lines, plain, wrapped
from perfdoctor.report.text import WIDTH
from perfdoctor.treat.cures import treatments_for
from perfdoctor.trial.parity import Parity
from perfdoctor.trial.verdict import SpeedUp, Verdict
from perfdoctor.units import (
    format_bytes,
    format_ms,
    format_plural,
    format_ratio_change,
    format_spread,
    format_times,
    ms,
)
from perfdoctor.version import VERSION

SCHEMA_VERSION = 1
Again = Callable[[Sequence[str]], str]
_INDENT = 3
_LABELS = 18
_UNFIT, _NOT_TRIED = "does not fit: ", "not tried: "  # how the reasons of trial/verdict.py begin


def ranked(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Accepted ones by what they save; then those that were timed, then those that were not."""
    return tuple(sorted(verdicts, key=lambda v: (not v.accepted, v.saving is None, -v.saved_ns if v.accepted else 0)))


def best_of(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The one to keep: of those accepted the one that saves most, be it one treatment or several together."""
    return max((v for v in verdicts if v.accepted), key=lambda v: v.saved_ns, default=None)


def render_verdicts(
    verdicts: Sequence[Verdict],
    diagnosis: Diagnosis,
    *,
    width: int = WIDTH,
    root: str = "",
    notes: Sequence[str] = (),
    again: Again | None = None,
) -> str:
    """The page. `again(names)` is the command that tries these treatments with more time."""
    order = ranked(verdicts)
    single = [v for v in order if v.accepted and not v.is_set]
    sets = [v for v in order if v.is_set]
    rejected = [v for v in order if not v.accepted and not v.is_set]
    lines: list[Line] = [*_head(order, diagnosis, width)]
    for number, verdict in enumerate(single, 1):
        lines += ((), *_accepted(f"{number}  {verdict.treatment}", verdict, diagnosis, width, root))
    for verdict in sets:
        lines += ((), *_together(verdict, diagnosis, width, root))
    lines += _rejected(rejected, width)
    for note in notes:
        lines += ((), *wrapped(note, width, label="Note", indent=6))
    command = _command(order, diagnosis, again)
    if command:
        rows = command_lines(command, width, indent=_INDENT)
        lines += ((), *wrapped("The time did not suffice for all. To go on:", width), *rows)
    lines += ((), *_ending(best_of(order), diagnosis, width, root, order))
    return plain(lines)


def render_verdicts_json(
    verdicts: Sequence[Verdict], diagnosis: Diagnosis, *, notes: Sequence[str] = (), again: Again | None = None
) -> str:
    """Indented JSON, ending in a newline."""
    best = best_of(verdicts)
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": "treatments",
        "perfdoctor": VERSION,
        "source": diagnosis.source,
        "environment": asdict(diagnosis.environment),
        "verdicts": [_document(verdict, diagnosis) for verdict in ranked(verdicts)],
        "best": None if best is None else best.treatment,
        "lines": [] if best is None else list(best.lines),
        "again": _command(ranked(verdicts), diagnosis, again) or None,
        "notes": list(notes),
    }
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def verdicts_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of `render_verdicts_json`."""
    text = files("perfdoctor.report").joinpath("verdicts_schema.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def _head(verdicts: Sequence[Verdict], diagnosis: Diagnosis, width: int) -> list[Line]:
    tried = [v for v in verdicts if v.saving is not None]
    bases = [v.before.median_ns for v in tried if v.before is not None]
    step = f": {format_ms(median(bases))} a step as it is" if bases else ""
    where = phrases.machine(diagnosis.environment)
    rows = wrapped(f"Treatments of {diagnosis.source}{step}", width, style="strong")
    if where:
        rows += wrapped(where, width, style="faint")
    single = [v for v in tried if not v.is_set]
    apart = sum(v.num_processes > 0 for v in single)
    processes = f", {apart} in processes of their own" if apart else ""
    if not single:
        return [*rows, *wrapped("none was timed: see below", width, style="faint")]
    text = (
        f"{len(single) - apart} timed in blocks of steps with and without in turn{processes}; losses compared first; "
        "95 % intervals"
    )
    return [*rows, *wrapped(text, width, style="faint")]


def _accepted(title: str, verdict: Verdict, diagnosis: Diagnosis, width: int, root: str) -> list[Line]:
    return [*wrapped(title, width, style="place"), *_figures(verdict, width), *_cured(verdict, diagnosis, width, root)]


def _together(verdict: Verdict, diagnosis: Diagnosis, width: int, root: str) -> list[Line]:
    rows = wrapped(f"Together: {verdict.treatment}", width, style="place")
    if verdict.saving is None:
        return [*rows, *wrapped(verdict.reason, width, indent=_INDENT)]
    if not verdict.accepted:
        rows += wrapped(f"not to keep: {verdict.reason}", width, indent=_INDENT)
    return [*rows, *_figures(verdict, width)]


def _figures(verdict: Verdict, width: int) -> list[Line]:
    rows: list[Line] = []
    before, after, speed_up, saving = verdict.before, verdict.after, verdict.speed_up, verdict.saving
    if before is not None and after is not None and speed_up is not None and saving is not None:
        ends = f"{format_times(speed_up.low)} to {format_times(speed_up.high)}"
        rows += _row("speed-up", f"{format_times(speed_up.mid)} ({ends})", width)
        change = f"{format_ms(before.median_ns)} -> {format_ms(after.median_ns)}"
        spread = format_spread(saving.low_ns, saving.high_ns)
        rows += _row("a step", f"{change}, saves {format_ms(saving.mid_ns)} ({spread})", width)
    rows += _row("losses", verdict.parity.text.removeprefix("losses "), width)
    memory = _memory(verdict)
    rows += _row("peak memory", memory, width) if memory else []
    return [*rows, *(_row("processes", _processes(verdict), width) if verdict.num_processes else [])]


def _processes(verdict: Verdict) -> str:
    steps = "" if verdict.before is None else f" of {verdict.before.basis.partition(' of ')[2]}"
    return f"{format_plural(verdict.num_processes, 'process')}{steps}: {verdict.why_processes}"


def _memory(verdict: Verdict) -> str:
    before, after = verdict.peak_memory_before_bytes, verdict.peak_memory_after_bytes
    if before is None or after is None:
        return ""
    change = f", {format_ratio_change(after / before - 1)}" if before > 0 else ""
    return f"{format_bytes(before)} -> {format_bytes(after)}{change}"


def _cured(verdict: Verdict, diagnosis: Diagnosis, width: int, root: str) -> list[Line]:
    rows: list[Line] = []
    for finding in _findings(verdict, diagnosis)[:3]:
        room = finding.headroom
        predicted = "" if room is None else f"; replay had predicted {format_ms(room.mid_ns)} for it"
        rows += _row("for" if not rows else "", f"{phrases.where(finding, root)}  {finding.code}{predicted}", width)
    return rows


def _rejected(verdicts: Sequence[Verdict], width: int) -> list[Line]:
    """Those that were tried, those that were not, and those that do not fit: each with the reason, said once."""
    undecided = [v for v in verdicts if _is_undecided(v)]
    unfit = [v for v in verdicts if v.reason.startswith(_UNFIT)]
    tried = [v for v in verdicts if v not in undecided and v not in unfit]
    return [
        *_reasons("Not to keep", [(v.treatment, f"{v.reason}{_measured(v)}") for v in tried], width),
        *_reasons("Not decided", [(v.treatment, f"{v.reason}{_measured(v)}") for v in undecided], width),
        *_reasons("Does not fit this loop", [(v.treatment, v.reason.removeprefix(_UNFIT)) for v in unfit], width),
    ]


def _is_undecided(verdict: Verdict) -> bool:
    return verdict.wants_time or verdict.reason.startswith(_NOT_TRIED)


def _reasons(title: str, rows: Sequence[tuple[str, str]], width: int) -> list[Line]:
    """A section of `(treatment, why)`; treatments of one reason share a row."""
    if not rows:
        return []
    names: dict[str, list[str]] = {}
    for name, why in rows:
        names.setdefault(why, []).append(name)
    indent = max((len(each[0]) for each in names.values() if len(each) == 1), default=0) + _INDENT + 2
    lines: list[Line] = [(), *wrapped(title, width, style="strong")]
    for why, each in names.items():
        if len(each) == 1:
            lines += wrapped(why, width, label=f"{' ' * _INDENT}{each[0]}", indent=indent)
        else:
            lines += wrapped(f"{', '.join(each)}: {why}", width, indent=_INDENT)
    return lines


def _measured(verdict: Verdict) -> str:
    saving = verdict.saving
    apart = f"; {_processes(verdict)}" if verdict.num_processes else ""
    if saving is None:
        return apart
    if saving.certain and saving.mid_ns < 0:
        return f", by {format_ms(-saving.mid_ns)} ({format_spread(-saving.high_ns, -saving.low_ns)}){apart}"
    return f" ({format_spread(saving.low_ns, saving.high_ns)} saved){apart}"


def _ending(best: Verdict | None, diagnosis: Diagnosis, width: int, root: str, order: Sequence[Verdict]) -> list[Line]:
    if best is None:
        return wrapped(_nothing([v for v in order if not v.is_set]), width, style="strong")
    speed_up = "" if best.speed_up is None else f", {format_times(best.speed_up.mid)} as fast"
    rows = wrapped(f"Lines to change ({best.treatment}{speed_up})", width, style="strong")
    places = [finding for finding in _findings(best, diagnosis) if finding.site is not None]
    where = ", ".join(dict.fromkeys(phrases.where(finding, root) for finding in places[:3]))
    if where:
        rows += wrapped(f"for {where}", width, indent=_INDENT, style="faint")
    rows += map(_code, best.lines)
    for verdict in _others_alone(best, order):
        rows += wrapped(f"{verdict.treatment}, alone; not measured together:", width, indent=_INDENT, style="faint")
        rows += map(_code, verdict.lines)
    return rows


def _others_alone(best: Verdict, order: Sequence[Verdict]) -> list[Verdict]:
    """What else is to be kept, where no set of them was timed: it failed, or there was no time for it."""
    if any(verdict.is_set and verdict.saving is not None for verdict in order):
        return []
    return [verdict for verdict in order if verdict.accepted and verdict is not best]


def _nothing(verdicts: Sequence[Verdict]) -> str:
    """What there is to say where no treatment is to be kept: tried in vain, or not tried, and why not."""
    unfit = sum(v.reason.startswith(_UNFIT) for v in verdicts)
    undecided = sum(map(_is_undecided, verdicts))
    tried = len(verdicts) - unfit - undecided
    counts = ((undecided, "not decided"), (unfit, "not fit for this loop"))
    left = ", ".join(f"{number} {what}" for number, what in counts if number)
    if tried:
        beside = f"; {left}" if left else ""
        lead = "Nothing to change so far" if undecided else "Nothing to change"
        return f"{lead}: of {format_plural(tried, 'treatment')} tried none is to be kept{beside}."
    if undecided:
        return f"Nothing was decided: no treatment was tried to the end ({left})."
    return "Nothing was tried: none of these treatments fits this loop." if unfit else "Nothing was tried."


def _code(line: str) -> Line:
    return (" " * _INDENT, ""), (line, "code")


def _command(verdicts: Sequence[Verdict], diagnosis: Diagnosis, again: Again | None) -> str:
    """What to run for those that the time did not suffice for; '' where it did. Of sets, their parts."""
    late = [name for verdict in verdicts if verdict.wants_time for name in verdict.names]
    if not late:
        return ""
    names = tuple(dict.fromkeys(late))
    return again(names) if again is not None else f"perfdoctor trial --treat={','.join(names)} {phrases.PLACEHOLDER}"


def _row(label: str, text: str, width: int) -> list[Line]:
    return wrapped(text, width, label=f"{' ' * _INDENT}{label}", indent=_LABELS)


def _findings(verdict: Verdict, diagnosis: Diagnosis) -> list[Finding]:
    """What was found that one of the verdict's treatments is for."""
    names = set(verdict.names)
    return [finding for finding in diagnosis.findings if names & set(treatments_for(finding.code))]


def _document(verdict: Verdict, diagnosis: Diagnosis) -> dict[str, Any]:
    saving = verdict.saving
    return {
        "treatment": verdict.treatment,
        "accepted": verdict.accepted,
        "reason": verdict.reason,
        "parity": _parity(verdict.parity),
        "before": step_document(verdict.before),
        "after": step_document(verdict.after),
        "speed_up": _speed_up(verdict.speed_up),
        "saving": None
        if saving is None
        else {
            "mid_ms": ms(saving.mid_ns),
            "low_ms": ms(saving.low_ns),
            "high_ms": ms(saving.high_ns),
            "significant": saving.certain,
            "num_pairs": saving.num_pairs,
        },
        "peak_memory_before_bytes": verdict.peak_memory_before_bytes,
        "peak_memory_after_bytes": verdict.peak_memory_after_bytes,
        "lines": list(verdict.lines),
        "num_processes": verdict.num_processes,
        "why_processes": verdict.why_processes,
        "cures": [_cure(finding) for finding in _findings(verdict, diagnosis)],
    }


def _cure(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "site": None if finding.site is None else site_document(finding.site),
        "predicted_ms": None if finding.headroom is None else ms(finding.headroom.mid_ns),
    }


def _parity(parity: Parity) -> dict[str, Any]:
    return {
        "kept": parity.kept,
        "text": parity.text,
        "difference": _finite(parity.difference),
        "repeat": _finite(parity.repeat),
        "num_losses": parity.num_losses,
    }


def _speed_up(speed_up: SpeedUp | None) -> dict[str, float | None] | None:
    if speed_up is None:
        return None
    return {"mid": _finite(speed_up.mid), "low": _finite(speed_up.low), "high": _finite(speed_up.high)}


def _finite(value: float | None) -> float | None:
    """JSON has no infinities: null."""
    return value if value is not None and math.isfinite(value) else None
