"""A Comparison as text, as JSON, and as GitHub's workflow commands. Pure: Comparison -> str.

The JSON's keys at the top: schema_version (1), change ('faster', 'slower', 'no difference', 'not comparable'),
incomparable (why not, or null), difference_ms (after less before) with low_ms, high_ms, ratio (of the step before; all
null where not comparable) and rule; before and after (path, median_ms, low_ms, high_ms, num_steps, num_blocks (of a
trial; null where single steps were timed), basis, samples_per_s); prediction (predicted_ms, counterfactual_ms,
measured_ms, error_ratio of the step before; null where nothing that was priced is gone); findings (gone, new, kept);
warnings.
"""

from __future__ import annotations

import json
from typing import Any

from perfdoctor.report.annotations import escaped
from perfdoctor.report.json import optional_ms
from perfdoctor.report.lines import Line, plain, wrapped
from perfdoctor.trial.compared_run import ComparedRun, FindingRow
from perfdoctor.trial.comparison import Change, Comparison
from perfdoctor.units import format_ms, format_plural, format_ratio_change, format_spread, ms

SCHEMA_VERSION = 1
WIDTH = 96
_LABEL = 16


def render_comparison_text(comparison: Comparison) -> str:
    """The page, ending in a newline."""
    lines: list[Line] = wrapped(sentence(comparison), WIDTH, style="strong")
    lines += [(), *_runs(comparison)]
    for text in comparison.warnings:
        lines += wrapped(text, WIDTH, label="warning", indent=_LABEL)
    lines += [(), *_findings(comparison)]
    if scored := prediction(comparison):
        lines += [(), *wrapped(scored, WIDTH, label="prediction", indent=_LABEL)]
    if not comparison.incomparable:
        lines += [(), *wrapped(f"Interval: {comparison.rule}.", WIDTH)]
    return plain(lines)


def sentence(comparison: Comparison) -> str:
    """The answer: faster, slower or no difference, by how much, within what; or why there is none."""
    if comparison.incomparable:
        return f"Step times cannot be compared: {comparison.incomparable}."
    interval = f"{_signed(comparison.low_ns)} to {_signed(comparison.high_ns)}"
    steps = f"{format_ms(comparison.before.median_ns)} -> {format_ms(comparison.after.median_ns)} a step"
    if comparison.change is Change.NONE:
        return f"No difference: {steps}; the interval of after less before, {interval}, holds zero."
    return (
        f"{comparison.change.value.capitalize()} by {format_ms(abs(comparison.difference_ns))} "
        f"({format_ratio_change(comparison.ratio)}): {steps}; after less before {interval}."
    )


def prediction(comparison: Comparison) -> str:
    """What the findings that are gone were said to give back, beside what came; '' where none is gone."""
    if not comparison.gone or comparison.incomparable:
        return ""
    measured = (
        f"measured {_signed(-comparison.difference_ns)} "
        f"({_signed(-comparison.high_ns)} to {_signed(-comparison.low_ns)})"
    )
    said = [] if comparison.predicted_ns is None else [f"said to give back {format_ms(comparison.predicted_ns)}"]
    if comparison.counterfactual_ns is not None:
        together = " together" if comparison.tried_together else ""
        nothing = "" if together or _is_certain(comparison) else " (no difference)"
        most = " at most" if any(row.code == "data-wait" for row in comparison.gone) else ""  # a loader's is a bound
        said.append(f"counterfactual{together}{most} {format_ms(comparison.counterfactual_ns)}{nothing}")
    if not said:
        return f"what is gone had not been priced; {measured}"
    error = _error_ratio(comparison)
    several = ", each alone" if len(comparison.gone) > 1 and not comparison.tried_together else ""
    off = "" if error is None else f"; off by {format_ratio_change(error)} of the step"
    return f"{', '.join(said)}{several}; {measured}{off}"


def _is_certain(comparison: Comparison) -> bool:
    """Whether the trial had claimed anything for one of the findings that are gone: its interval leaves zero out."""
    rows = [(row.counterfactual_low_ns, row.counterfactual_high_ns) for row in comparison.gone]
    return any(low is None or high is None or low > 0 or high < 0 for low, high in rows)


def _error_ratio(comparison: Comparison) -> float | None:
    """Predicted less measured, as a share of the step before; the trial's figure where there is one."""
    said = comparison.predicted_ns if comparison.counterfactual_ns is None else comparison.counterfactual_ns
    return None if said is None else (said + comparison.difference_ns) / comparison.before.median_ns


def _runs(comparison: Comparison) -> list[Line]:
    lines: list[Line] = []
    for label, run in (("before", comparison.before), ("after", comparison.after)):
        rate = "" if run.samples_per_s is None else f", {run.samples_per_s:,.0f} samples/s"
        spread = format_spread(run.low_ns, run.high_ns)
        timed = f"{format_plural(run.num_steps, 'step')} ({run.basis})"
        if run.num_blocks is not None:
            timed = f"{format_plural(run.num_blocks, 'block')}, {timed}"
        text = f"{format_ms(run.median_ns)} ({spread}), {timed}{rate}: {run.path}"
        lines += wrapped(text, WIDTH, label=label, indent=_LABEL)
    return lines


def _findings(comparison: Comparison) -> list[Line]:
    lines: list[Line] = []
    moved = [match for match in comparison.kept if match.moved]
    for label, rows in (("gone", comparison.gone), ("new", comparison.new)):
        for row in rows:
            lines += wrapped(_finding(row), WIDTH, label=label, indent=_LABEL)
    for match in moved:
        text = f"{_finding(match.before)} -> {match.after.place}"
        lines += wrapped(text, WIDTH, label="moved", indent=_LABEL)
    stayed = len(comparison.kept) - len(moved)
    if stayed:
        lines += wrapped(f"{format_plural(stayed, 'finding')} as before", WIDTH, label="same", indent=_LABEL)
    return lines or wrapped("No findings in either.", WIDTH)


def _finding(row: FindingRow) -> str:
    room = "" if row.headroom_ns is None else f" (said to give back {format_ms(row.headroom_ns)})"
    return f"{row.code} at {row.place}: {row.title}{room}"


def _signed(ns: float) -> str:
    return f"{'+' if ns > 0 else '-' if ns < 0 else ''}{format_ms(abs(ns))}"


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain dicts and lists."""
    known = not comparison.incomparable
    said = {
        "predicted_ms": optional_ms(comparison.predicted_ns),
        "counterfactual_ms": optional_ms(comparison.counterfactual_ns),
        "measured_ms": ms(-comparison.difference_ns),
        "low_ms": ms(-comparison.high_ns),
        "high_ms": ms(-comparison.low_ns),
        "error_ratio": None if (error := _error_ratio(comparison)) is None else round(error, 4),
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "change": comparison.change.value,
        "incomparable": comparison.incomparable or None,
        "difference_ms": ms(comparison.difference_ns) if known else None,
        "low_ms": ms(comparison.low_ns) if known else None,
        "high_ms": ms(comparison.high_ns) if known else None,
        "ratio": round(comparison.ratio, 4) if known else None,
        "rule": comparison.rule,
        "before": _run(comparison.before),
        "after": _run(comparison.after),
        "prediction": said if known and comparison.gone and error is not None else None,
        "findings": {
            "gone": [_row(row) for row in comparison.gone],
            "new": [_row(row) for row in comparison.new],
            "kept": [
                {**_row(m.before), "after_file": m.after.file, "after_line": m.after.line, "moved": m.moved}
                for m in comparison.kept
            ],
        },
        "warnings": list(comparison.warnings),
    }


def render_comparison_json(comparison: Comparison) -> str:
    """Indented JSON, ending in a newline."""
    return json.dumps(comparison_document(comparison), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def render_comparison_github(comparison: Comparison) -> str:
    """One workflow command for the answer, one for each warning."""
    level = "warning" if comparison.change in (Change.SLOWER, Change.UNKNOWN) else "notice"
    lines = [(level, sentence(comparison)), *(("warning", text) for text in comparison.warnings)]
    return "".join(f"::{level} title=perfdoctor compare::{escaped(text)}\n" for level, text in lines)


def _run(run: ComparedRun) -> dict[str, Any]:
    return {
        "path": run.path,
        "median_ms": ms(run.median_ns),
        "low_ms": ms(run.low_ns),
        "high_ms": ms(run.high_ns),
        "num_steps": run.num_steps,
        "num_blocks": run.num_blocks,
        "basis": run.basis,
        "samples_per_s": run.samples_per_s,
    }


def _row(row: FindingRow) -> dict[str, Any]:
    return {
        "code": row.code,
        "kind": row.kind,
        "title": row.title,
        "file": row.file,
        "line": row.line,
        "function": row.function,
        "headroom_ms": optional_ms(row.headroom_ns),
        "counterfactual_ms": optional_ms(row.counterfactual_ns),
    }
