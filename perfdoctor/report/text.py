"""A Diagnosis as one page of text.

The order is the order of use: what binds the loop, the findings by what would come back (the first three with their
advice, the rest in two lines), what to leave alone, where the step goes, what could not be judged, notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perfdoctor.diagnose.finding import Diagnosis, Finding, Severity
from perfdoctor.report import phrases
from perfdoctor.report.lines import Line, coloured, command_lines, cut, plain, wrapped
from perfdoctor.report.shares import Share, shares
from perfdoctor.units import format_duration, format_ms, format_share

WIDTH = 96
NUM_PROMINENT = 3
_INDENT = 3
_LABEL = 16
_BAR = 32
_Numbered = tuple[int, tuple[Finding, tuple[Finding, ...]]]  # a finding, and those that its edit cures too


def render_text(
    diagnosis: Diagnosis, *, width: int = WIDTH, colour: bool = False, root: str = "", script: str = ""
) -> str:
    """The page, ending in a newline. Paths below `root` are given relative to it.

    `script`: what was run, as it is typed behind `perfdoctor trial`; '' where that is not known.
    """
    width = min(max(width, 60), 120)
    groups = list(enumerate(phrases.grouped(diagnosis.findings), 1))
    blocks = [
        _head(diagnosis, width),
        *(_prominent(i, f, with_it, diagnosis, width, root, script) for i, (f, with_it) in groups[:NUM_PROMINENT]),
        _others(groups[NUM_PROMINENT:], diagnosis, width, root),
        _leave_alone(diagnosis, width, root),
        _ranks(diagnosis, width),
        _where_it_goes(diagnosis, width),
        _remarks(diagnosis, width),
    ]
    lines = [line for block in blocks if block for line in (*block, ())]
    return coloured(lines[:-1], width) if colour else plain(lines[:-1])


def _head(diagnosis: Diagnosis, width: int) -> list[Line]:
    environment = phrases.machine(diagnosis.environment)
    title = f"perfdoctor: {diagnosis.source}" + (f" on {environment}" if environment else "")
    lines = wrapped(title, width, style="faint")
    lines.append(())
    lines += wrapped(phrases.headline(diagnosis), width, style="strong")
    if promise := phrases.promise(diagnosis):
        lines += wrapped(promise, width, style="strong")
    figures = _figures(diagnosis)
    if figures:
        lines.append(())
    for label, text in figures:
        lines += wrapped(text, width, label=label, indent=_LABEL)
    return lines


def _figures(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    rows = []
    if diagnosis.step is not None:
        rows.append((phrases.time_label(diagnosis), phrases.step_line(diagnosis.step)))
    if rates := phrases.rates(diagnosis):
        rows.append(("throughput", rates))
    ratio = phrases.busy_ratio(diagnosis)
    if ratio is not None:
        rows.append(("GPU busy", f"{format_share(ratio)} ({phrases.BUSY_CAVEAT})"))
    if diagnosis.accounting is not None and diagnosis.accounting.run_ahead_ns:
        run_ahead = format_duration(diagnosis.accounting.run_ahead_ns)
        rows.append(("run-ahead", f"{run_ahead} of launched work waits in front of the GPU (median)"))
    if memory := phrases.memory(diagnosis.environment):
        rows.append(("memory", memory))
    return rows


def _prominent(
    number: int, finding: Finding, with_it: Sequence[Finding], diagnosis: Diagnosis, width: int, root: str, script: str
) -> list[Line]:
    rows = _site_lines(number, finding, width, root)
    often = phrases.how_often(finding, diagnosis.step)
    title = phrases.what(finding) + (f" ({often})" if often else "")
    style = "error" if finding.severity is Severity.ERROR else ""
    rows += _row("", title, width, style)
    rows += _row("", phrases.led_there(finding, root), width, "faint")
    if finding.measured_saving is not None or finding.withheld not in _shared_reasons(diagnosis):
        rows += _row("comes back", phrases.cost(finding, diagnosis.step), width, "cost")
    rows += _row("in all" if phrases.is_window(diagnosis.step) else "in the step", phrases.waits(finding), width)
    rows += _row(phrases.afterwards_label(finding), finding.afterwards, width)
    for other in with_it:
        rows += _row("cured with it", phrases.beside(other, diagnosis.step), width)
    if finding.advice is not None:
        rows += _row("do", finding.advice.text, width)
        rows += [((" " * (_INDENT + _LABEL) + "  ", ""), (line, "code")) for line in finding.advice.lines]
    label, command = phrases.trial_command(finding, diagnosis, script)
    rows += command_lines(command, width, label=" " * _INDENT + label, indent=_INDENT + _LABEL) if command else []
    rows += _row("basis", finding.basis, width, "faint")
    return rows


def _row(label: str, text: str, width: int, style: str = "") -> list[Line]:
    if not text:
        return []
    if not label:
        return wrapped(text, width, indent=_INDENT, style=style)
    return wrapped(text, width, label=" " * _INDENT + label, indent=_INDENT + _LABEL, style=style)


def _site_lines(number: int, finding: Finding, width: int, root: str) -> list[Line]:
    """`1  train.py:84   loss_sum += loss.item()`: one line where it fits, else the source text on a line of its own."""
    place = phrases.where(finding, root)
    lead: Line = ((f"{number:<{_INDENT}}", "strong"), (place, "place"))
    text = finding.site.text.strip() if finding.site is not None else ""
    if not text:
        return [lead]
    if _INDENT + len(place) + 3 + len(text) <= width:
        return [(*lead, ("   ", ""), (text, "code"))]
    return [lead, ((" " * _INDENT, ""), (cut(text, width - _INDENT), "code"))]


def _others(groups: Iterable[_Numbered], diagnosis: Diagnosis, width: int, root: str) -> list[Line]:
    rows: list[Line] = []
    for number, (finding, with_it) in groups:
        rows += _site_lines(number, finding, width, root)
        parts = (
            phrases.what(finding),
            phrases.how_often(finding, diagnosis.step),
            phrases.short_cost(finding, diagnosis.step),
        )
        rows += _row("", "; ".join(part for part in parts if part), width)
        for other in with_it:
            rows += _row("", f"cured with it: {phrases.beside(other, diagnosis.step)}", width)
        if finding.advice is not None:
            rows += wrapped(finding.advice.text, width, label="   do:", indent=_INDENT + 4, style="faint")
    return rows


def _leave_alone(diagnosis: Diagnosis, width: int, root: str) -> list[Line]:
    if not diagnosis.leave_alone:
        return []
    rows: list[Line] = [((phrases.leave_alone_title(diagnosis), "strong"),)]
    rare = phrases.is_rare(diagnosis)
    for finding in diagnosis.leave_alone:
        text = f"{phrases.where(finding, root)}  {finding.code}: {finding.title}"
        if often := phrases.how_often(finding, diagnosis.step, rare=rare):
            text += f", {often}"
        rows.append(((" " * _INDENT, ""), (cut(text, width - _INDENT), "faint")))
    return rows


def _where_it_goes(diagnosis: Diagnosis, width: int) -> list[Line]:
    accounting = diagnosis.accounting
    if accounting is None or accounting.window_ns <= 0:
        return []
    rows = shares(accounting)
    title = wrapped(phrases.where_title(accounting, diagnosis.step), width, style="strong")
    return [*title, *(_share_line(row, accounting.window_ns, width) for row in rows)]


def _share_line(row: Share, window_ns: int, width: int) -> Line:
    ratio = row.time_ns / window_ns
    name = row.name if not row.busy else f"busy: {row.name}"
    figures = f"{format_ms(row.time_ns):>9}  {format_share(ratio):>6}  "
    bar = "█" * round(max(ratio, 0) * min(_BAR, width - 60))
    return ((f"{'':<{_INDENT}}{cut(name, 32):<33}", ""), (figures, ""), (bar, "busy" if row.busy else "idle"))


def _ranks(diagnosis: Diagnosis, width: int) -> list[Line]:
    if not diagnosis.ranks:
        return []
    rows: list[Line] = [(("   rank     step    GPU busy   exposed communication", "strong"),)]
    for rank in diagnosis.ranks:
        step, busy, exposed = phrases.rank_figures(rank)
        text = f"   {rank.rank:>4}  {step:>9}  {busy:>8}   {exposed:>21}"
        rows.append(((cut(f"{text}   {rank.note}".rstrip(), width), ""),))
    return rows


def _remarks(diagnosis: Diagnosis, width: int) -> list[Line]:
    withheld = sorted(_shared_reasons(diagnosis))
    skipped = [f"{row.check}: {row.why}" for row in diagnosis.skipped]
    notes = phrases.notes(diagnosis)
    overheads = [phrases.overhead(row) for row in diagnosis.overheads]
    rows: list[Line] = []
    for label, texts in (
        ("On the loop", diagnosis.advice),
        ("Withheld", withheld),
        ("Not judged", skipped),
        ("Notes", notes),
        ("Slowed by watching", ["; ".join(overheads)] if overheads else []),
    ):
        rows += _bullets(label, texts, width)
    return rows


def _bullets(label: str, texts: Iterable[str], width: int) -> list[Line]:
    rows: list[Line] = []
    for text in texts:
        rows += wrapped(text, width, label=label, indent=_LABEL + _INDENT + 1)
        label = ""
    return rows


def _shared_reasons(diagnosis: Diagnosis) -> set[str]:
    """Reasons for withholding that several findings share: said once, at the end. What a trial measured needs none."""
    unpriced = [f for f in diagnosis.findings if f.headroom is None and f.measured_saving is None]
    reasons = [f.withheld for f in unpriced if f.withheld]
    return {reason for reason in reasons if reasons.count(reason) > 1}
