"""A Diagnosis as one self-contained HTML page, or as a fragment for a notebook. No script, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from perfdoctor.diagnose.finding import Accounting, Diagnosis, Finding, RankRow, Severity, StepTime
from perfdoctor.report import phrases
from perfdoctor.report.shares import Share, shares
from perfdoctor.report.style import (
    BANDWIDTH_COLOUR,
    COMMUNICATION_COLOUR,
    COPY_COLOUR,
    CSS,
    MATRIX_COLOUR,
    OTHER_COLOUR,
    idle_colour,
)
from perfdoctor.units import format_ms, format_plural, format_share

NUM_PROMINENT = 3
_BUSY_COLOURS = {
    "matrix kernels": MATRIX_COLOUR,
    "bandwidth-bound kernels": BANDWIDTH_COLOUR,
    "copies alone": COPY_COLOUR,
    "communication alone": COMMUNICATION_COLOUR,
    "other kernels": OTHER_COLOUR,
}


def render_html(
    diagnosis: Diagnosis, *, root: str = "", fragment: bool = False, timeline: str = "", script: str = ""
) -> str:
    """The report as HTML. With `fragment` a `<div>` that takes its colours from the page around it.

    `timeline`: an <svg> of one step; `script`: what was run, as it is typed behind `perfdoctor trial`.
    """
    body = "".join(
        (
            _head(diagnosis),
            _picture(diagnosis.accounting, diagnosis.step),
            f'<div class="timeline">{timeline}</div>' if timeline else "",
            _findings(diagnosis, root, script),
            _leave_alone(diagnosis, root),
            _ranks(diagnosis.ranks),
            _remarks(diagnosis),
        )
    )
    report = f'<div class="perfdoctor"><style>{CSS}</style>{body}</div>'
    if fragment:
        return report
    title = escape(f"perfdoctor: {diagnosis.source}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title></head><body class='perfdoctor-page'>{report}</body></html>\n"
    )


def _head(diagnosis: Diagnosis) -> str:
    environment = phrases.machine(diagnosis.environment)
    source = diagnosis.source + (f" on {environment}" if environment else "")
    figures = []
    if diagnosis.step is not None:
        figures.append(
            (
                format_ms(diagnosis.step.median_ns),
                "the recording" if phrases.is_window(diagnosis.step) else "a step",
                phrases.step_line(diagnosis.step),
            )
        )
    ratio = phrases.busy_ratio(diagnosis)
    if ratio is not None:
        figures.append((format_share(ratio), "GPU busy", phrases.BUSY_CAVEAT))
    if rates := phrases.rates(diagnosis):
        first = rates.partition(",")[0].partition(" (")[0]
        figures.append((first, "throughput", rates))
    if memory := phrases.memory(diagnosis.environment):
        figures.append((memory.removeprefix("peak ").partition(" of ")[0], "peak memory", memory))
    cells = "".join(
        f"<div><strong>{escape(value)}</strong><span>{escape(label)}</span><small>{escape(more)}</small></div>"
        for value, label, more in figures
    )
    headline = escape(phrases.headline(diagnosis)).replace(" %", "&nbsp;%")
    return (
        f'<p class="faint">perfdoctor: {escape(source)}</p><h1>{headline}</h1>'
        f"<p>{escape(phrases.promise(diagnosis))}</p><div class='figures'>{cells}</div>"
    )


def _picture(accounting: Accounting | None, step: StepTime | None) -> str:
    if accounting is None or accounting.window_ns <= 0:
        return ""
    rows = _coloured(shares(accounting))
    title = phrases.where_title(accounting, step)
    return f"<h2>{escape(title)}</h2>{_bar(rows, accounting.window_ns)}{_legend(rows, accounting.window_ns)}"


def _coloured(rows: Iterable[Share]) -> list[tuple[Share, str]]:
    return [
        (row, _BUSY_COLOURS[row.name] if row.busy else idle_colour(row.name.removeprefix("idle: "))) for row in rows
    ]


def _bar(rows: Sequence[tuple[Share, str]], window_ns: int) -> str:
    parts, left = [], 0.0
    for row, colour in rows:
        width = 1000 * max(row.time_ns, 0) / window_ns
        name = escape(f"{row.name} {format_ms(row.time_ns)}")
        parts.append(
            f'<rect x="{left:.2f}" width="{width:.2f}" height="36" fill="{colour}"><title>{name}</title></rect>'
        )
        left += width
    return (
        '<svg viewBox="0 0 1000 36" preserveAspectRatio="none" role="img" aria-label="Where a step goes">'
        f"{''.join(parts)}</svg>"
    )


def _legend(rows: Sequence[tuple[Share, str]], window_ns: int) -> str:
    items = "".join(
        f'<li><i style="background:{colour}"></i>{escape(row.name)} <b>{format_ms(row.time_ns)}</b> '
        f"{format_share(row.time_ns / window_ns)}</li>"
        for row, colour in rows
    )
    return f'<ul class="legend">{items}</ul>'


def _findings(diagnosis: Diagnosis, root: str, script: str) -> str:
    if not diagnosis.findings:
        return ""
    groups = phrases.grouped(diagnosis.findings)
    all_cards = [_card(i, f, with_it, diagnosis, root, script) for i, (f, with_it) in enumerate(groups, 1)]
    cards, rest = "".join(all_cards[:NUM_PROMINENT]), "".join(all_cards[NUM_PROMINENT:])
    more = len(groups) - NUM_PROMINENT
    return f"<h2>What to change</h2>{cards}" + (
        f"<details><summary>{format_plural(more, 'more finding')}</summary>{rest}</details>" if rest else ""
    )


def _card(
    number: int, finding: Finding, with_it: Sequence[Finding], diagnosis: Diagnosis, root: str, script: str
) -> str:
    often = phrases.how_often(finding, diagnosis.step)
    title = phrases.what(finding) + (f" ({often})" if often else "")
    text = finding.site.text.strip() if finding.site is not None else ""
    rows = (
        ("comes back", phrases.cost(finding, diagnosis.step)),
        ("in all" if phrases.is_window(diagnosis.step) else "in the step", phrases.waits(finding)),
        (phrases.afterwards_label(finding), finding.afterwards),
        *(("cured with it", phrases.beside(other, diagnosis.step)) for other in with_it),
        ("do", finding.advice.text if finding.advice is not None else ""),
    )
    label, tried = phrases.trial_command(finding, diagnosis, script)
    table = "".join(f"<dt>{label}</dt><dd>{escape(value)}</dd>" for label, value in rows if value)
    paste = "\n".join(finding.advice.lines) if finding.advice is not None else ""
    kind = "card error" if finding.severity is Severity.ERROR else "card"
    return (
        f'<section class="{kind}"><h3>{number}. {escape(phrases.where(finding, root))}</h3>'
        + (f"<code>{escape(text)}</code>" if text else "")
        + f"<p>{escape(title)}</p>"
        + _optional("p", phrases.led_there(finding, root))
        + f"<dl>{table}</dl>"
        + (f"<pre>{escape(paste)}</pre>" if paste else "")
        + (f"<dl><dt>{label}</dt><dd><code>{escape(tried)}</code></dd></dl>" if tried else "")
        + _optional("small", finding.basis)
        + "</section>"
    )


def _optional(tag: str, text: str) -> str:
    return f'<{tag} class="faint">{escape(text)}</{tag}>' if text else ""


def _leave_alone(diagnosis: Diagnosis, root: str) -> str:
    rows = [f"{phrases.where(f, root)}  {f.code}: {f.title}" for f in diagnosis.leave_alone]
    return _list(phrases.leave_alone_title(diagnosis), rows)


def _ranks(ranks: Sequence[RankRow]) -> str:
    if not ranks:
        return ""
    body = "".join(
        f"<tr><td>{row.rank}</td>{''.join(f'<td>{text}</td>' for text in phrases.rank_figures(row))}"
        f"<td>{escape(row.note)}</td></tr>"
        for row in ranks
    )
    head = "<tr><th>rank</th><th>step</th><th>GPU busy</th><th>exposed communication</th><th></th></tr>"
    return f"<h2>Ranks</h2><table>{head}{body}</table>"


def _remarks(diagnosis: Diagnosis) -> str:
    overheads = "; ".join(phrases.overhead(row) for row in diagnosis.overheads)
    return (
        _list("On the loop", diagnosis.advice)
        + _list("Not judged", [f"{row.check}: {row.why}" for row in diagnosis.skipped])
        + _list("Notes", phrases.notes(diagnosis))
        + _list("Slowed by watching", [overheads] if overheads else [])
    )


def _list(title: str, rows: Sequence[str]) -> str:
    if not rows:
        return ""
    return f"<h2>{escape(title)}</h2><ul>{''.join(f'<li>{escape(row)}</li>' for row in rows)}</ul>"
