"""Several ranks of one run in one report: who is late to the collectives, why, and what all of them have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfdoctor.diagnose.clock_alignment import Alignment, align, collectives
from perfdoctor.diagnose.finding import Diagnosis, Finding, RankRow, Severity
from perfdoctor.diagnose.host_lines import HostLines
from perfdoctor.record.capture import Capture, Frame, Note
from perfdoctor.record.timeline import Timeline
from perfdoctor.units import format_duration, format_ms, format_spread

# A rank is late where the others wait for it this share of the step; less is the jitter of any run.
_LATE_SHARE = 0.02
# Of what a rank is late by, a cause must explain this much to be named.
_WHY_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Who waits for whom in the common collectives, in ns a step. One entry a rank, in the order of the captures.

    `held_up_ns`: how much sooner the others could have gone on had this rank come with the second to last.
    `waited_ns`: from this rank's arrival to the last one's. `exposed` ends and late starts are on one clock.
    """

    held_up_ns: tuple[int, ...]
    waited_ns: tuple[int, ...]

    @property
    def latest(self) -> int:
        """The position of the rank that holds the others up most."""
        return max(range(len(self.held_up_ns)), key=lambda position: self.held_up_ns[position])


def lateness(alignment: Alignment) -> Lateness:
    """From aligned starts and ends, shape (ranks, collectives), to waits a step."""
    starts, ends = alignment.start_ns, alignment.end_ns
    order = np.sort(starts, axis=0)
    last, second = order[-1], order[-2]
    latest = np.argmax(starts, axis=0)
    held = np.zeros(len(starts), np.int64)
    np.add.at(held, latest, last - second)
    waited = np.minimum(np.maximum(last - starts, 0), ends - starts).sum(axis=1)
    steps = alignment.num_steps
    return Lateness(
        held_up_ns=tuple(round(int(value) / steps) for value in held),
        waited_ns=tuple(round(int(value) / steps) for value in waited),
    )


def combine_ranks(
    captures: Sequence[Capture], judged: Sequence[Diagnosis], missing: Mapping[int, str] | None = None
) -> Diagnosis:
    """One diagnosis of several ranks: the page of the late rank, or of the slowest where none is late.

    Args:
        captures: one for each rank that recorded, at least one.
        judged: the diagnosis of each, in the same order.
        missing: ranks without a recording, and why.
    """
    rows = [_row(i, capture, each) for i, (capture, each) in enumerate(zip(captures, judged, strict=True))]
    same_run = len({row.rank for row in rows}) == len(rows)  # else one file twice, or files of different runs
    alignment = align([collectives(Timeline(capture)) for capture in captures]) if same_run else None
    waits = lateness(alignment) if alignment is not None else None
    late = _late_rank(rows, waits)
    page = late if late is not None else _slowest(rows, judged)
    if waits is not None:
        rows = [_noted(row, i, rows, waits, late) for i, row in enumerate(rows)]
    remarks = [_page_remark(rows, page, late, judged), *_gaps(rows, missing or {})]
    if late is not None and waits is not None:
        line = line_excess(late, captures, rows)
        remarks.append(_why_late(late, rows, judged, waits, line))
    if alignment is not None:
        remarks.append(_clocks(alignment))
    findings = _said_once(page, rows, judged)
    known = {_key(finding) for finding in findings}
    return replace(
        judged[page],
        findings=findings,
        leave_alone=tuple(f for f in judged[page].leave_alone if _key(f) not in known),
        ranks=tuple(sorted(rows, key=lambda row: row.rank)),
        notes=(*judged[page].notes, *_missing_notes(missing or {})),
        advice=(*(remark for remark in remarks if remark), *judged[page].advice),
    )


def _row(position: int, capture: Capture, diagnosis: Diagnosis) -> RankRow:
    accounting = diagnosis.accounting
    return RankRow(
        rank=capture.environment.rank if capture.environment.rank is not None else position,
        path=capture.path,
        step_ns=diagnosis.step.median_ns if diagnosis.step else None,
        busy_ratio=accounting.busy_ns / accounting.window_ns if accounting and accounting.window_ns else None,
        exposed_communication_ns=accounting.communication_ns if accounting else None,
        note="" if diagnosis.step else "no step was timed on it",
    )


def _late_rank(rows: Sequence[RankRow], waits: Lateness | None) -> int | None:
    """The position of the rank that the others wait for, None where none is late for long."""
    if waits is None:
        return None
    latest = waits.latest
    return latest if waits.held_up_ns[latest] > _LATE_SHARE * max(rows[latest].step_ns or 0, 1) else None


def _noted(row: RankRow, position: int, rows: Sequence[RankRow], waits: Lateness, late: int | None) -> RankRow:
    if position == late:
        return replace(row, note=f"late: holds the others up {format_ms(waits.held_up_ns[position])} a step")
    waited = waits.waited_ns[position]
    if waited <= _LATE_SHARE * (row.step_ns or 0):
        return row
    return replace(row, note=f"waits {format_ms(waited)} a step for {_whom(rows, late)}")


def _whom(rows: Sequence[RankRow], late: int | None) -> str:
    return f"rank {rows[late].rank}" if late is not None else "others"


def _slowest(rows: Sequence[RankRow], judged: Sequence[Diagnosis]) -> int:
    """The rank with the longest step of those whose device was recorded: of others little can be said. Without
    devices, whose ranks step in time, that with the longest waits."""
    if _without_device(judged):
        return max(range(len(rows)), key=lambda i: sum(own_parts(judged[i]).values()))
    recorded = [i for i, each in enumerate(judged) if each.accounting is not None]
    return max(recorded, key=lambda i: rows[i].step_ns or 0)


def _without_device(judged: Sequence[Diagnosis]) -> bool:
    return all(each.accounting is None for each in judged)


def _page_remark(rows: Sequence[RankRow], page: int, late: int | None, judged: Sequence[Diagnosis]) -> str:
    if len(rows) < 2:
        return f"This page is of rank {rows[page].rank}, the only one with a recording."
    if all(row.step_ns is None for row in rows):
        return f"No step was timed on any of the {len(rows)} ranks. This page is of rank {rows[page].rank}."
    role = "with the longest waits of its own" if _without_device(judged) else "the slowest"
    if late is not None:
        role = "the late one"
    return f"This page is of rank {rows[page].rank}, {role} of {len(rows)}."


def _gaps(rows: Sequence[RankRow], missing: Mapping[int, str]) -> list[str]:
    numbers = [row.rank for row in rows]
    remarks = []
    if len(set(numbers)) < len(numbers):
        remarks.append("Several files say that they are the same rank: one file twice, or files of different runs?")
    without = [str(row.rank) for row in rows if row.step_ns is None]
    if 0 < len(without) < len(rows):
        who = f"rank {without[0]}: it" if len(without) == 1 else f"the ranks {', '.join(without)}: they"
        remarks.append(f"No step was timed on {who} did not train, or ended before.")
    dark = [str(row.rank) for row in rows if row.busy_ratio is None and row.step_ns is not None]
    if dark and len(dark) + len(without) < len(rows):
        who = f"rank {dark[0]}" if len(dark) == 1 else f"the ranks {', '.join(dark)}"
        remarks.append(f"No device work was recorded on {who}: a file that was cut, or recorded in another way?")
    if missing:
        remarks.append("Without a recording: " + "; ".join(f"rank {r}: {why}" for r, why in sorted(missing.items())))
    return remarks


def _missing_notes(missing: Mapping[int, str]) -> list[Note]:
    return [Note(code="missing-rank", text=f"rank {rank}: {why}") for rank, why in sorted(missing.items())]


def _clocks(alignment: Alignment) -> str:
    apart = max(alignment.offset_ns) - min(alignment.offset_ns)
    sure = max(alignment.spread_ns)
    return (
        f"Clocks aligned on the ends of {alignment.num_common} common collectives: they were "
        f"{format_duration(apart)} apart, ends agree within {format_duration(sure)}."
    )


def own_parts(diagnosis: Diagnosis) -> dict[str, int]:
    """What a rank does in a step before it waits for others, in ns a step: kernels that are no communication, and idle
    time by cause. Without a device: the host's waits, by finding."""
    accounting = diagnosis.accounting
    if accounting is None:
        return {f.code: f.host_blocked_ns for f in diagnosis.findings if f.host_blocked_ns}
    parts = {"kernels": accounting.busy_ns - accounting.communication_ns}
    return {**parts, **accounting.idle_by_code, "idle, unexplained": accounting.unexplained_ns}


def excess(late: int, judged: Sequence[Diagnosis]) -> list[tuple[str, int]]:
    """(part, ns a step) that the late rank spends beyond the mean of the others, most first."""
    own = own_parts(judged[late])
    others = [own_parts(each) for i, each in enumerate(judged) if i != late]
    more = {part: ns - round(sum(o.get(part, 0) for o in others) / len(others)) for part, ns in own.items()}
    return sorted(((part, ns) for part, ns in more.items() if ns > 0), key=lambda item: -item[1])


def line_excess(late: int, captures: Sequence[Capture], rows: Sequence[RankRow]) -> tuple[Frame, int] | None:
    """The line of the user's where the late rank's host spends most beyond the mean of the others, and those ns a step.

    From stack samples: None where a rank has none.
    """
    spent = [
        {frame: share * (row.step_ns or 0) for frame, share in HostLines(capture).shares().items()}
        for capture, row in zip(captures, rows, strict=True)
    ]
    others = [each for i, each in enumerate(spent) if i != late]
    if not all(spent):
        return None
    more = {frame: ns - sum(each.get(frame, 0.0) for each in others) / len(others) for frame, ns in spent[late].items()}
    frame = max(more, key=lambda each: more[each])
    return frame, round(more[frame])


def _why_late(
    late: int, rows: Sequence[RankRow], judged: Sequence[Diagnosis], waits: Lateness, line: tuple[Frame, int] | None
) -> str:
    held = waits.held_up_ns[late]
    lead = f"Rank {rows[late].rank} is late to the collectives: the others lose {format_ms(held)} a step to it."
    causes = [(part, ns) for part, ns in excess(late, judged) if ns >= _WHY_SHARE * held][:3]
    parts = [f"{part} {format_ms(ns)}{_at(part, judged[late])}" for part, ns in causes]
    if line is not None and line[1] >= _WHY_SHARE * held:
        parts.append(f"{format_ms(line[1])} of its host's time at {line[0]}")
    if not parts:
        return f"{lead} What it does more than they do could not be told."
    return f"{lead} What it spends more a step than the others: {', '.join(parts)}."


def _at(code: str, diagnosis: Diagnosis) -> str:
    site = next((f.site for f in diagnosis.findings if f.code == code and f.site is not None), None)
    return f" ({site.frame})" if site is not None else ""


_Key = tuple[str, str, str, int]


def _key(finding: Finding) -> _Key:
    frame = finding.site.frame if finding.site is not None else None
    return finding.code, finding.kind, frame.file if frame else "", frame.line if frame else 0


def _said_once(page: int, rows: Sequence[RankRow], judged: Sequence[Diagnosis]) -> tuple[Finding, ...]:
    """The findings of all ranks, each once: as the page's rank has it, else as the rank that loses most to it."""
    found: dict[_Key, dict[int, Finding]] = {}
    for position in (page, *(i for i in range(len(judged)) if i != page)):
        for finding in judged[position].findings:
            found.setdefault(_key(finding), {}).setdefault(position, finding)
    for position, each in enumerate(judged):
        for finding in each.leave_alone:  # a minor cost on one rank is the same finding where it costs more
            if _key(finding) in found:
                found[_key(finding)].setdefault(position, finding)
    said = [_of_ranks(group, page, rows) for group in found.values()]
    return tuple(sorted(said, key=lambda f: (f.severity != Severity.ERROR,)))


def _of_ranks(group: Mapping[int, Finding], page: int, rows: Sequence[RankRow]) -> Finding:
    shown = page if page in group else max(group, key=lambda i: _cost(group[i]))
    finding = group[shown]
    costs = [f.headroom.mid_ns for f in group.values() if f.headroom is not None]
    spread = f", {format_spread(min(costs), max(costs))}" if len(costs) > 1 else ""
    numbers = sorted(rows[i].rank for i in group)
    if len(group) == len(rows):
        if len(rows) == 1:
            return finding
        return replace(finding, basis=_joined(finding.basis, f"on all {len(rows)} ranks{spread}"))
    names = ", ".join(map(str, numbers))
    only = f"only on rank {names}" if len(numbers) == 1 else f"only on ranks {names}"
    return replace(
        finding,
        title=f"{finding.title}, {only}",
        basis=_joined(finding.basis, f"of rank {rows[shown].rank}{spread}" if len(numbers) > 1 else ""),
    )


def _joined(basis: str, more: str) -> str:
    return "; ".join(part for part in (basis, more) if part)


def _cost(finding: Finding) -> int:
    return finding.headroom.mid_ns if finding.headroom is not None else finding.host_blocked_ns or 0
